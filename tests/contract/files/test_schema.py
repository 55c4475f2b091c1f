"""Dataclasses from JSON and back: nothing unknown, missing or of another type gets through."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget
from sinkprune.contract.engines_manifest import EnginesManifest, EngineSpec
from sinkprune.contract.files.manifest_file import FileSpec
from sinkprune.contract.files.schema import Bounds, SchemaError, from_json, to_json
from sinkprune.contract.manifest import Checkpoint, GraphSpec, LanguageModel, Manifest, TensorSpec, Tokens
from sinkprune.contract.plans import Plan


@dataclass(frozen=True)
class Leaf:
    """A part of `Tree`."""

    size: int
    scale: float


@dataclass(frozen=True)
class Tree:
    """Every kind of field a manifest has."""

    name: str
    flag: bool
    count: int
    ratio: float
    kind: Literal["oak", "elm"]
    parent: str | None
    leaves: tuple[Leaf, ...]
    tags: list[str]
    by_name: dict[str, Leaf]
    extra: dict[str, Any]
    anything: Any


TREE = Tree("a", True, 3, 0.5, "oak", None, (Leaf(1, 2.0),), ["x"], {"l": Leaf(2, 1.5)}, {"k": [1, None]}, [1, "n"])
JSON: dict[str, Any] = {
    "name": "a",
    "flag": True,
    "count": 3,
    "ratio": 0.5,
    "kind": "oak",
    "parent": None,
    "leaves": [{"size": 1, "scale": 2.0}],
    "tags": ["x"],
    "by_name": {"l": {"size": 2, "scale": 1.5}},
    "extra": {"k": [1, None]},
    "anything": [1, "n"],
}
WRONG: dict[str, list[Any]] = {
    "name": [None, 1, True, ["a"], {}],
    "flag": [None, 0, 1, "true", []],
    "count": [None, True, 3.0, "3", [3]],
    "ratio": [None, False, "0.5", [0.5]],
    "kind": [None, "ash", 0, ["oak"], {"oak": 1}],
    "parent": [1, True, ["a"], {}],
    "leaves": [
        None,
        {},
        "x",
        [None],
        [[]],
        [{"size": 1}],
        [{"size": 1, "scale": 1, "x": 1}],
        [{"size": "1", "scale": 1}],
    ],
    "tags": [None, "x", {}, [1], [None], [["x"]]],
    "by_name": [None, [], "l", {"l": None}, {"l": []}, {"l": {}}, {"l": {"size": 2, "scale": None}}],
    "extra": [None, [], "k"],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)
KINDS = (
    *(Tree, Manifest, Budget, Plan, LanguageModel, GraphSpec, TensorSpec, FileSpec, Tokens, Checkpoint),
    *(EnginesManifest, EngineSpec),
)


def test_a_value_survives_the_way_to_json_text_and_back() -> None:
    assert to_json(TREE) == JSON
    assert from_json(Tree, json.loads(json.dumps(to_json(TREE)))) == TREE


def test_an_optional_field_may_hold_its_value_too() -> None:
    assert from_json(Tree, {**JSON, "parent": "b"}).parent == "b"


def test_a_whole_number_is_a_float_where_one_is_expected() -> None:
    ratio = from_json(Tree, {**JSON, "ratio": 2}).ratio
    assert (ratio, type(ratio)) == (2.0, float)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"\$\.ratio"):
        from_json(Tree, {**JSON, "ratio": 10**400})


@pytest.mark.parametrize("field", JSON)
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    data = {name: value for name, value in JSON.items() if name != field}
    with pytest.raises(SchemaError, match=rf"^\$: missing field '{field}'$"):
        from_json(Tree, data)


@pytest.mark.parametrize("field", ["nmae", "", "Name", "__class__"])
def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(SchemaError, match=rf"^\$: unknown field '{field}'$"):
        from_json(Tree, {**JSON, field: 1})


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_refused_with_its_place(field: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=rf"^\$\.{field}"):
        from_json(Tree, {**JSON, field: value})


def test_the_message_names_the_place_what_was_found_and_what_was_expected() -> None:
    data = {**JSON, "leaves": [{"size": 1, "scale": 1}, {"size": "big", "scale": 1}]}
    with pytest.raises(SchemaError, match=r"^\$\.leaves\[1\]\.size: found 'big', expected int$"):
        from_json(Tree, data)
    with pytest.raises(SchemaError, match=r"^\$\.by_name\.l: missing field 'scale'$"):
        from_json(Tree, {**JSON, "by_name": {"l": {"size": 1}}})
    with pytest.raises(SchemaError, match=r"^\$\.kind: found 'ash', expected one of 'oak', 'elm'$"):
        from_json(Tree, {**JSON, "kind": "ash"})


@dataclass(frozen=True)
class Bounded:
    """Fields that have bounds."""

    few: Annotated[int, Bounds(1, 64)]
    share: Annotated[float, Bounds(0, 1)] | None
    sizes: tuple[Annotated[int, Bounds(1, 64)], ...]


@pytest.mark.parametrize("few", [1, 64])
@pytest.mark.parametrize("share", [0, 1.0, None])
def test_numbers_within_bounds_are_read(few: int, share: float | None) -> None:
    assert from_json(Bounded, {"few": few, "share": share, "sizes": [few]}) == Bounded(few, share, (few,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"few": 0}, r"\$\.few: found 0, expected 1 to 64"),
        ({"few": 65}, "expected 1 to 64"),
        ({"few": True}, "expected int"),
        ({"few": 10**5000}, "found a number of more than 80 digits, expected 1 to 64"),
        ({"share": -0.1}, r"\$\.share: found -0.1, expected 0 to 1"),
        ({"share": math.nan}, "found nan, expected 0 to 1"),
        ({"sizes": [1, 65]}, r"\$\.sizes\[1\]: found 65"),
        ({"few": "x" * 10**6}, r"found 'x{79}\.\.\., expected int"),
    ],
    ids=["below", "above", "bool", "digits", "share", "nan", "in a list", "long"],
)
def test_numbers_out_of_bounds_are_refused_in_short(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said) as caught:
        from_json(Bounded, {"few": 1, "share": None, "sizes": [], **change})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("data", [None, True, 1, 1.5, "x", [], [JSON]], ids=repr)
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(SchemaError, match=r"^\$: found .*, expected dict$"):
        from_json(Tree, data)


@given(data=VALUES, kind=st.sampled_from(KINDS))
@settings(max_examples=300, deadline=None)
def test_any_json_value_is_refused_or_read(data: Any, kind: type) -> None:
    with pytest.raises(SchemaError):
        from_json(kind, data)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_value_in_any_field_is_refused_or_read_as_it_is(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(get_type_hints(Tree))))
    value = data.draw(VALUES)
    try:
        read = from_json(Tree, {**JSON, field: value})
    except SchemaError as error:
        assert str(error).startswith(f"$.{field}")
    else:
        # repr tells 1 from True and lets NaN equal itself; whole numbers become floats.
        expected = float(value) if field == "ratio" else value
        assert repr(to_json(read)[field]) == repr(expected)
