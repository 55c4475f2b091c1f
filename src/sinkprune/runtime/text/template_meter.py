"""What a chat template may use up while it is rendered: steps and characters, paid before they are taken."""

from __future__ import annotations

from collections.abc import ItemsView, KeysView, ValuesView
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Context, Undefined

STEPS = 400_000
"""How many steps a rendering may take; published templates take some thousands."""
CHARACTERS = 4 << 20
"""How many characters a rendering may make, all its strings together; published templates make some thousands."""
_STEPS_A_CHARACTER, _COPIES = 16, 64
_DIGITS, _BITS = 340, 1024
_DEPTH = 32
_QUOTED = 10
"""The most characters that one has between the quotes of a list that is printed."""
_METER = "\0meter"


class BoundError(TemplateError):
    """A template goes past a bound, which the message names."""


class Meter:
    """The account of one rendering. Every method raises `BoundError` where it does not cover what is asked.

    A step is what takes some hundred nanoseconds: a part of a loop's body, an item, eight characters that are read.
    """

    def __init__(self, given: int) -> None:
        """`given` is how many characters the conversation has: longer ones may take more."""
        self.steps = self._all_steps = STEPS + _STEPS_A_CHARACTER * given
        self.characters = self._all_characters = CHARACTERS + _COPIES * given

    def step(self, count: int) -> None:
        """Pay for `count` steps."""
        self.steps -= count
        if self.steps < 0:
            raise BoundError(f"it takes more than {self._all_steps} steps")

    def make(self, count: int) -> None:
        """Pay for `count` new characters."""
        self.characters -= count
        if self.characters < 0:
            raise BoundError(f"it makes more than {self._all_characters} characters of text")

    def read(self, value: Any) -> int:
        """Pay for walking over all of `value`; the most characters that its text can have.

        What occurs twice is walked over twice, as whoever prints or compares it would.
        """
        if isinstance(value, str):
            self.step(len(value) >> 3)
            return len(value)
        if not _has_parts(value):
            return _printed(value)
        characters, level = 0, [value]
        for _ in range(_DEPTH):
            deeper: list[Any] = []
            for outer in level:
                self.step(1 + len(outer))
                characters += 16
                for part in _parts(outer):
                    if _has_parts(part):
                        deeper.append(part)
                    elif isinstance(part, str):
                        self.step(len(part) >> 3)
                        characters += 4 + _QUOTED * len(part)
                    else:
                        characters += 4 + _printed(part)
            if not deeper:
                return characters
            level = deeper
        raise BoundError(f"it nests a value more than {_DEPTH} deep")

    def text(self, value: Any) -> str:
        """`value` as text, paid for."""
        self.make(self.read(value))
        return str(value)

    def made(self, value: Any) -> Any:
        """`value` as it came from a call, paid for. What is yet to be computed is computed."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, int):
            self.number(value.bit_length())
        elif hasattr(value, "__next__"):
            return iter(self.items(value))
        elif isinstance(value, (list, tuple)):
            self.step(len(value))
        return value

    def whole(self, value: Any) -> Any:
        """`value`, computed to its end where it is yet to be: a list in place of an iterator."""
        return self.items(value) if hasattr(value, "__next__") else value

    def items(self, values: Any) -> list[Any]:
        """What `values` holds, paid for one by one."""
        found = []
        for value in values:
            self.step(1)
            found.append(value)
        return found

    def number(self, bits: int) -> None:
        """Refuse a whole number of `bits` that is none to count with."""
        if bits > _BITS:
            raise BoundError(f"it computes a number of more than {_BITS} bits")


def metered(variables: dict[str, Any], given: int) -> dict[str, Any]:
    """A rendering's `variables`, and its meter under a name that no template can write."""
    return {**variables, _METER: Meter(given)}


def meter_of(context: Context) -> Meter:
    """The meter of the rendering that `context` is of."""
    meter: Meter = context.parent[_METER]
    return meter


def _has_parts(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, range, KeysView, ValuesView, ItemsView))


def _parts(value: Any) -> Any:
    return (part for pair in value.items() for part in pair) if isinstance(value, dict) else value


def _printed(value: Any) -> int:
    """The most characters of a value without parts; raises `BoundError` for what is no data."""
    if isinstance(value, Undefined):
        return 0
    if value is None or isinstance(value, (int, float)):
        return _DIGITS
    if isinstance(value, str):
        return len(value)
    raise BoundError(f"it reads a {type(value).__name__} as if it were text")
