"""Checks of values: JSON fields, ranges of numbers, and control characters in untrusted text."""

from __future__ import annotations

import json
import math
import sys
import unicodedata
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Plan
from sinkprune.contract.checks import (
    OPTIONAL,
    Bounds,
    Imported,
    RealNumber,
    SchemaError,
    WholeNumber,
    escaped,
    from_json,
    to_json,
)
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.engines_manifest import EnginesManifest
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import LanguageModel, Manifest
from sinkprune.contract.policy_facts import NumberRanges

Share = Annotated[int | float, Bounds(0, 1)]


@dataclass(frozen=True)
class Leaf:
    """A part of `Tree`."""

    size: Annotated[int, Bounds(1, 64)]
    scale: float


@dataclass(frozen=True)
class Fruit:
    """Another."""

    name: str


class Loose(TypedDict, total=False):
    """An object with optional fields, whose other fields are ignored."""

    share: Share | None
    name: Annotated[str, Bounds(1, 9)]
    pairs: Annotated[list[Share], Bounds(2, 2)] | int


@dataclass(frozen=True)
class Tree:
    """Every kind of field that files have."""

    name: str
    flag: bool
    count: int
    ratio: float
    kind: Literal["oak", "elm"]
    parent: str | None
    leaves: tuple[Leaf, ...]
    by_name: dict[str, Leaf]
    either: Leaf | Fruit
    loose: Loose
    anything: Any
    ranges: Annotated[dict[str, Any], Imported("sinkprune.contract.policy_facts:NumberRanges")] | None


LOOSE: Loose = {"share": 1, "name": "a", "pairs": [0, 0.5]}
RANGES: Any = NumberRanges((0.0,), (1.0,))
TREE = Tree(
    "a", True, 3, 0.5, "oak", None, (Leaf(1, 2.0),), {"l": Leaf(2, 1.5)}, Fruit("pear"), LOOSE, [1, "n"], RANGES
)
JSON: dict[str, Any] = json.loads(json.dumps(to_json(TREE)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)


def test_values_come_back_as_they_were() -> None:
    assert JSON["leaves"] == [{"size": 1, "scale": 2.0}]
    assert from_json(Tree, JSON) == TREE
    assert from_json(Tree, {**JSON, "parent": "b"}).parent == "b"
    # A whole number is a float where one is expected, and stays what it is where both are.
    assert repr(from_json(Tree, {**JSON, "ratio": 2}).ratio) == "2.0"
    assert repr(from_json(Tree, JSON).loose) == repr(LOOSE)
    assert from_json(Loose, {"bomb": 10**30, "pairs": 4}) == {"pairs": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "$.name: found 1, expected text"),
        ({"count": True}, "$.count: found True, expected a whole number"),
        ({"ratio": math.inf}, "$.ratio: found inf, expected a number"),
        ({"ratio": 10**400}, "$.ratio: found a number of more than 80 digits, expected a number"),
        ({"kind": "ash"}, "$.kind: found 'ash', expected one of 'oak', 'elm'"),
        ({"parent": 1}, "$.parent: found 1, expected text or null"),
        ({"leaves": [{"size": 1}]}, "$.leaves[0]: missing field 'scale'"),
        ({"leaves": [{"size": 65, "scale": 1}]}, "$.leaves[0].size: found 65, expected a whole number from 1 to 64"),
        ({"either": {"names": 1}}, "$.either: missing field 'name'"),
        ({"loose": {"share": 1.5}}, "$.loose.share: found 1.5, expected a number from 0 to 1 or null"),
        ({"loose": {"name": ""}}, "$.loose.name: found '', expected 1 to 9 printable characters"),
        ({"loose": {"pairs": [1]}}, "expected a list of 2, each a number from 0 to 1 or a whole number"),
        ({"count": "x" * 10**6}, f"$.count: found 'x{'x' * 78}..., expected a whole number"),
        ({"ranges": {"low": [0]}}, "$.ranges: missing field 'high'"),
        ({"__class__": 1}, "$: unknown field '__class__'"),
    ],
)
def test_the_message_says_where_what_was_found_and_what_was_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        from_json(Tree, {**JSON, **change})
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_missing_field_is_refused_by_name() -> None:
    for missing in JSON:
        with pytest.raises(SchemaError, match=rf"^\$: missing field '{missing}'$"):
            from_json(Tree, {name: value for name, value in JSON.items() if name != missing})


@dataclass(frozen=True)
class Grown:
    """An object that got a field later."""

    name: str
    added: Leaf | None = field(default=None, metadata=OPTIONAL)


def test_an_object_may_lack_an_optional_field_and_does_without_a_value() -> None:
    assert from_json(Grown, {"name": "a"}) == from_json(Grown, {"name": "a", "added": None}) == Grown("a")
    assert to_json(Grown("a")) == {"name": "a"}
    whole = Grown("a", Leaf(1, 2.0))
    assert from_json(Grown, to_json(whole)) == whole
    with pytest.raises(SchemaError, match=r"^\$\.added: missing field 'scale'$"):
        from_json(Grown, {"name": "a", "added": {"size": 1}})


@given(data=VALUES, kind=st.sampled_from((Tree, Manifest, LanguageModel, Plan, EnginesManifest)))
@settings(max_examples=200, deadline=None)
def test_any_json_value_is_refused_as_a_whole(data: Any, kind: type) -> None:
    with pytest.raises(SchemaError):
        from_json(kind, data)


WHOLE = WholeNumber("--count", 1, 100)
REAL = RealNumber("--share", 0.0, sys.float_info.max, "0 or a larger finite number")


@given(st.integers() | st.floats())
def test_numbers_within_the_range_are_taken_and_no_others(number: float) -> None:
    whole = isinstance(number, int) and 1 <= number <= 100
    if whole:
        assert (WHOLE.check(number), WHOLE(repr(number))) == (number, number)
    if 0 <= number <= sys.float_info.max:
        assert (REAL.check(number), REAL(repr(number))) == (float(number), float(number))
    else:
        for refuse in (lambda: REAL.check(number), lambda: REAL(repr(number))):
            with pytest.raises(UsageError, match=r"^--share is .*, expected 0 or a larger finite number\.$"):
                refuse()
    for refuse in () if whole else (lambda: WHOLE.check(number), lambda: WHOLE(repr(number))):
        with pytest.raises(UsageError, match=r"^--count is .*, expected a whole number from 1 to 100\.$"):
            refuse()


def test_what_is_no_number_of_the_kind() -> None:
    for value in (np.int64(3), np.uint8(3), 3):
        assert (type(WHOLE.check(value)), type(REAL.check(value))) == (int, float)
    for wrong in (True, None, "3", b"3", [3], 3 + 0j, 10**5000, np.timedelta64(3, "s"), np.timedelta64(3, "ns")):
        with pytest.raises(UsageError, match="--count is "):
            WHOLE.check(wrong)
        with pytest.raises(UsageError, match="--share is "):
            REAL.check(wrong)
    with pytest.raises(UsageError, match="--count is "):
        WHOLE.check(np.float32(3))


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left_and_all_else_is(text: str) -> None:
    found = escaped(text)
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in found)
    if all(character.isprintable() for character in text):
        assert found == text


def test_an_error_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    def body(arguments: object) -> None:
        raise UsageError("'\x1b]0;owned\x07\x9b1m\r\u202e\udcffphoto\n.jpg' is missing.")

    assert run_command(body, None) == 2
    shown = r"\x1b]0;owned\x07\x9b1m\r\u202e\udcffphoto\n.jpg"
    assert capsys.readouterr().err == f"error: '{shown}' is missing.\n"
    assert escaped("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    # Joiners and right-to-left letters stay.
    joined = "\U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u0631"
    assert escaped(joined) == joined
