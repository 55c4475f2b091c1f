"""The benchmark of schema suites, on a suite of our own with every kind of schema that is supported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from json_schemas import cases, measure
from sinkprune import Pipeline

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
OBJECT = {"type": "object", "additionalProperties": False}
# A schema, values that it allows and values that it forbids.
KINDS: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "boolean"}, [True, False], [0, "true", None, []]),
    ({"type": ["integer", "null"], "minimum": 3, "exclusiveMaximum": 12}, [3, 11, None], [2, 12, 3.5, "3"]),
    ({"type": "number", "multipleOf": 0.5, "maximum": 1, "minimum": -1}, [0.5, -1], [0.7, 1.5]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", "é€b"], ["", "abcd", 1]),
    ({"type": "string", "pattern": "^(left|right)-[0-9]{1,2}$"}, ["left-07"], ["up-1", "left-", "left-123"]),
    ({"enum": ["red", 3, None, [1, {"a": 2}]]}, ["red", 3, None, [1, {"a": 2}]], ["blue", 4, [1]]),
    ({"const": {"a": [True]}}, [{"a": [True]}], [{"a": [False]}, {}, [True]]),
    (
        {**OBJECT, "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}, "b": {}}, "required": ["a"]},
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": 1}, {"a": 1, "c": 2}, {"a": "1"}, []],
    ),
    (
        {**OBJECT, "patternProperties": {"^n[0-9]$": {"type": "boolean"}}, "maxProperties": 2},
        [{}, {"n1": True}],
        [{"n1": 1}, {"m": True}, {"n1": True, "n2": True, "n3": True}],
    ),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        [[True], [True, False]],
        [[], [1], [True, True, True]],
    ),
    (
        {"type": "array", "prefixItems": [{"const": "a"}, {"type": "null"}], "items": False, "minItems": 2},
        [["a", None]],
        [["a"], ["b", None], ["a", None, 1]],
    ),
    ({"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 5, "maximum": 9}]}, [None, 7], [4, "7"]),
    ({"oneOf": [{"const": 1}, {"type": "string", "maxLength": 2}]}, [1, "ab"], [2, "abc"]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "4"]),
    ({"$ref": "#/$defs/tree", "$defs": {"tree": TREE}}, [[], [[], [[]]]], [[[], [], []], [1], None]),
    ({"$schema": DRAFT_7, "items": [{"type": "null"}], "additionalItems": False}, [[], [None]], [[1], [None, 1]]),
]
REJECTED: list[Any] = [
    True,
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"$ref": "https://example.com/a.json"},
    {"type": "strin"},
]


@pytest.fixture
def small(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("qwen-tied", "fp32", ("prune-66.7",))


def written(folder: Path) -> Path:
    """Write the suite into `folder`: a case, and the list of the others."""
    tests = []
    for schema, allowed, forbidden in [*KINDS, *((one, [], []) for one in REJECTED)]:
        values = [{"data": value, "valid": True} for value in allowed]
        values += [{"data": value, "valid": False} for value in forbidden]
        tests.append({"description": str(schema), "schema": schema, "tests": values})
    (folder / "cases.json").write_text(json.dumps(tests[1:]))
    (folder / "one").mkdir()
    (folder / "one" / "case.json").write_text(json.dumps(tests[0]))
    return folder


def test_no_schema_is_broken_and_no_forbidden_value_can_be_written(small: Pipeline, tmp_path: Path) -> None:
    found = measure(small, cases(written(tmp_path)), 100, "none", 60)
    assert found["violations"] == []
    assert found["schemas"]["accepted"] == len(KINDS) and found["schemas"]["rejected"] == len(REJECTED)
    assert found["schemas"]["conforming"] == len(KINDS) and found["schemas"]["not compared"] == 0
    allowed, forbidden = (sum(len(kind[part]) for kind in KINDS) for part in (1, 2))
    values = found["values"]
    assert values["valid"] == values["valid, allowed"] == allowed and values["invalid"] == forbidden
    assert set(values) == {"valid", "valid, allowed", "invalid"}
