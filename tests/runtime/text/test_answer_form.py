"""The forms of answers: which are refused when a request is made, also keywords that would be ignored."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sinkprune import UsageError
from sinkprune.runtime.steps.request import new_request
from sinkprune.runtime.text.answer_form import CHOICE_BYTES, MOST_CHOICES, REGEX_BYTES, SCHEMA_BYTES, checked_schema
from sinkprune.runtime.text.tools import Tools


def many_patterns(count: int) -> list[dict[str, str]]:
    """Patterns whose intersection is hard to compute."""
    return [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(10, 10 + count)]


def multiples(*divisors: float) -> list[dict[str, Any]]:
    return [{"type": "number", "multipleOf": divisor} for divisor in divisors]


def names(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^a{number}_": {} for number in range(count)}}


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schema": {"const": {1}}}, "schema is no JSON: Object of type set is not JSON serializable."),
        ({"schema": {"const": "\ud800"}}, "schema holds half of a surrogate pair"),
        ({"schema": {"const": "a" * SCHEMA_BYTES}}, f"bytes of JSON, expected at most {SCHEMA_BYTES}."),
        ({"schema": json.loads('{"items": ' * 70 + "{}" + "}" * 70)}, "schema is nested more than 64 deep."),
        ({"schema": {"type": "objet"}}, "schema is not supported: Invalid type: objet. Change the schema"),
        ({"schema": {"uniqueItems": True, "x-guidance": {"lenient": True}}}, 'Unimplemented keys: ["uniqueItems"].'),
        ({"schema": {"items": {"$ref": "#/$defs/b"}}}, "schema is not supported: Pointer '/$defs/b' does not exist"),
        ({"schema": {"pattern": "(?=a)"}}, "schema is not supported: look-around, including look-ahead"),
        ({"schema": {"const": [2**53 + 1]}}, "schema has the number 9007199254740993 at 'const/0', expected at most"),
        ({"schema": {"allOf": many_patterns(30)}}, "schema combines 30 patterns and formats, expected at most 12"),
        ({"schema": {"allOf": many_patterns(12)}}, "schema is not supported: Unable to determine if regex is empty"),
        ({"schema": {"anyOf": multiples(997, 991, 983)}}, "least common multiple 971230541 without"),
        # llguidance took 32704 for a multiple of 0.001 and 4295000.
        ({"schema": {"allOf": multiples(0.001, 4295000)}}, "least common multiple 4295000000 without"),
        ({"schema": {"items": multiples(3e-9)[0]}}, "a multipleOf with 9 decimal places, expected at most 8."),
        ({"schema": {"properties": {f"{number}": {} for number in range(3000)}}}, "too big (limit for"),
        ({"regex": ""}, "regex is '', expected a regular expression"),
        ({"regex": "a" * (REGEX_BYTES + 1)}, f"regex has {REGEX_BYTES + 1} bytes, expected at most {REGEX_BYTES}."),
        ({"regex": "a)(b"}, "regex cannot be used: unopened group. Correct it; look-around"),
        ({"choice": "yes"}, "choice is 'yes', expected a list of texts that are not empty"),
        ({"choice": ["yes", "no", "no"]}, "choice has 2 different texts of 3, expected 2 to"),
        ({"choice": [*map(str, range(MOST_CHOICES + 1))]}, f"expected 2 to {MOST_CHOICES}, all different"),
        ({"choice": ["yes", "a" * (CHOICE_BYTES + 1)]}, f"a text of choice has {CHOICE_BYTES + 1} bytes"),
        ({"choice": ["yes", "no"], "regex": "a"}, "regex and choice were given, expected at most one form"),
        ({"schema": {}, "stop": "\n"}, "schema and stop were given. A stop string would cut the answer"),
    ],
)
def test_what_is_no_form_is_refused_at_once_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        new_request("a.jpg", "Why?", **options)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_the_work_for_all_tools_counts_together() -> None:
    for most, more, said in (
        (multiples(5000)[0], multiples(9999)[0], "the least common multiple 49995000 without decimal points"),
        (names(70), names(72), "schema has 142 patterns of names in patternProperties, up to 72 in an object"),
    ):
        assert Tools([function("a", a=most), function("b", a=most)]).functions
        with pytest.raises(UsageError, match=said):
            Tools([function("a", a=most), function("b", a=more)])


def test_a_request_has_its_own_copy_of_a_schema() -> None:
    schema: dict[str, Any] = {"enum": ["a"]}
    request = new_request("a.jpg", "Why?", schema=schema)
    schema["enum"].append("b")
    assert request.schema == {"enum": ["a"]} and request.follows_grammar
    assert new_request("a.jpg", "Why?", schema={}).schema == {"type": "object"}
    assert not new_request("a.jpg", "Why?", choice=["yes", "no"]).follows_grammar


DRAFT_4, DRAFT_7 = ({"$schema": f"http://json-schema.org/draft-0{number}/schema#"} for number in (4, 7))
UNSUPPORTED: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (DRAFT_4, "", {"if": {"type": "string"}, "then": {"maxLength": 3}}),
    (DRAFT_4, "properties/a", {"contains": {"type": "string"}}),
    (DRAFT_7, "additionalProperties", {"dependentRequired": {"a": ["b"]}}),
    (DRAFT_7, "prefixItems/0", {"$dynamicRef": "#a"}),
    ({}, "anyOf/1", {"disallow": "integer"}),
    ({}, "properties/a/items/anyOf/1", {"extends": {"type": "string"}}),
]
"""A draft, a place in a schema, and a keyword with its value that is not supported there."""


def placed(place: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with another one at a place."""
    whole: Any = schema
    for part in reversed(place.split("/") if place else []):
        whole = [{"type": "null"}] * int(part) + [whole] if part.isdigit() else {part: whole}
    return whole  # type: ignore[no-any-return]


@pytest.mark.parametrize(("draft", "place", "schema"), UNSUPPORTED)
def test_a_keyword_that_no_draft_of_ours_keeps_is_refused(
    draft: dict[str, Any], place: str, schema: dict[str, Any]
) -> None:
    required = {"type": "integer", "required": True}
    keyword, *_ = schema
    for wrong, name, said in (
        ({**draft, **placed(place, schema)}, keyword, "a keyword at '{}' that is not supported. Leave it out."),
        (placed(place, required), "required", "True at '{}', expected a list of names. Write it next to properties."),
    ):
        path = f"{place}/{name}" if place else name
        with pytest.raises(UsageError, match=rf"^schema has {re.escape(said.format(path))}$"):
            checked_schema(wrong)


def test_an_unknown_draft_is_refused() -> None:
    for draft in ("http://json-schema.org/draft-03/schema#", "https://json-schema.org/v1", 7):
        with pytest.raises(UsageError, match=r"\$schema .*, expected draft 4, 6, 7, 2019-09 or 2020-12\. Leave out"):
            checked_schema({"$schema": draft, "type": "string"})


def test_annotations_names_and_values_are_taken() -> None:
    for schema in (
        DRAFT_4,
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"title": "a", "description": "b", "default": 3, "examples": [3], "deprecated": True, "x-maxLenght": 3},
        # Names of properties, and values.
        {"properties": {"if": {"type": "string"}, "maxLenght": {"type": "string"}, "required": {"type": "null"}}},
        {"const": {"disallow": 3, "required": True}},
        {"enum": [{"extends": {}}], "default": {"if": 3}},
    ):
        assert checked_schema({"type": "object", **schema} if "$schema" in schema else schema) is not None
