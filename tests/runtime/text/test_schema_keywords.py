"""Keywords that would be ignored are rejected; annotations, names and values are not. Errors name the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sinkprune import UsageError
from sinkprune.runtime.text.answer_form import checked_schema

DRAFT_4, DRAFT_7 = ({"$schema": f"http://json-schema.org/draft-0{number}/schema#"} for number in (4, 7))
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({**DRAFT_4, "if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
    ({**DRAFT_4, "contains": {"type": "string"}}, "contains"),
    ({**DRAFT_4, "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({**DRAFT_7, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**DRAFT_7, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({**DRAFT_7, "$dynamicRef": "#a"}, "$dynamicRef"),
    ({"disallow": "integer"}, "disallow"),
    ({"divisibleBy": 2}, "divisibleBy"),
    ({"extends": {"type": "string"}}, "extends"),
]
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "": lambda schema: schema,
    "properties/a": lambda schema: {"properties": {"b": {"type": "null"}, "a": schema, "c": {}}},
    "patternProperties/^a": lambda schema: {"patternProperties": {"^a": schema}},
    "additionalProperties": lambda schema: {"additionalProperties": schema},
    "items": lambda schema: {"type": "array", "items": schema},
    "prefixItems/0": lambda schema: {"type": "array", "prefixItems": [schema]},
    "anyOf/1": lambda schema: {"anyOf": [{"type": "null"}, schema]},
    "$defs/a": lambda schema: {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": schema}},
    "properties/a/items/anyOf/1": lambda schema: PLACES["properties/a"]({"items": PLACES["anyOf/1"](schema)}),
}


def at(place: str, *names: str) -> str:
    """Return the words that name a place and a field there."""
    path = "/".join([*([place] if place else []), *names])
    return f" at '{path}'" if path else ""


def reason(schema: dict[str, Any]) -> str:
    with pytest.raises(UsageError) as refused:
        checked_schema(schema)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("schema", "name", "place"), [(*each, place) for each, place in zip(UNSUPPORTED, PLACES, strict=True)]
)
def test_a_keyword_that_no_draft_of_ours_keeps_is_refused(schema: dict[str, Any], name: str, place: str) -> None:
    draft = {key: value for key, value in schema.items() if key == "$schema"}
    rest = {key: value for key, value in schema.items() if key != "$schema"}
    assert reason({**draft, **PLACES[place](rest)}) == (
        f"schema has a keyword{at(place, name)} that is not supported. Leave it out."
    )


@pytest.mark.parametrize("place", PLACES)
def test_required_next_to_its_own_type_is_refused(place: str) -> None:
    said = f"schema has True{at(place, 'required')}, expected a list of names. Write it next to properties."
    assert reason(PLACES[place]({"type": "integer", "required": True})) == said


@pytest.mark.parametrize(
    "draft", ["http://json-schema.org/draft-03/schema#", "https://json-schema.org/v1", "http://example.com/schema", 7]
)
def test_an_unknown_draft_is_refused(draft: object) -> None:
    said = reason({"$schema": draft, "type": "string"})
    assert re.match(r"schema has \$schema .*, expected draft 4, 6, 7, 2019-09 or 2020-12\. Leave out", said)


@pytest.mark.parametrize(
    "schema",
    [
        DRAFT_4,
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"title": "a", "description": "b", "default": 3, "examples": [3], "deprecated": True, "x-maxLenght": 3},
        # Names of properties, and values.
        {"properties": {"if": {"type": "string"}, "maxLenght": {"type": "string"}, "required": {"type": "null"}}},
        {"const": {"disallow": 3, "required": True}},
        {"enum": [{"extends": {}}], "default": {"if": 3}},
    ],
    ids=str,
)
def test_annotations_names_and_values_are_taken(schema: dict[str, Any]) -> None:
    assert checked_schema({"type": "object", **schema} if "$schema" in schema else schema) is not None
