"""What a checkpoint's JSON files may hold: tables of fields, each with its kind and its bounds.

A table names all that is read of a file, or of an object within it. What it does not name is left out, whatever it
is; what it names is checked before anybody computes with it. Bounds are what the format can mean, with room for
models ten times as large as any that is published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sinkprune.contract.errors import CheckpointError

_SHOWN = 60


class Kind:
    """What a field may hold."""

    types: ClassVar[tuple[type, ...]]
    """What `json` makes of such values."""

    @property
    def expected(self) -> str:
        """What is expected, in words that go on from "expected "."""
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        """Whether `value`, of one of `types`, is within bounds."""
        return True

    def read(self, value: Any, where: str) -> Any:
        """`value`, checked; raises `CheckpointError` that begins with `where`, the file's and the field's name."""
        # Not `isinstance`: True is no number.
        if type(value) not in self.types or not self.holds(value):
            raise CheckpointError(
                f"{where} is {_shown(value)}, expected {self.expected}. Mend it, or download the checkpoint again."
            )
        return value


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `least` to `most`."""

    types = (int,)
    least: int
    most: int

    @property
    def expected(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def holds(self, value: Any) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Number(Kind):
    """Any number from `least` to `most`."""

    types = (int, float)
    least: float
    most: float

    @property
    def expected(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def holds(self, value: Any) -> bool:
        return self.least <= value <= self.most


@dataclass(frozen=True)
class Flag(Kind):
    """True or false."""

    types = (bool,)
    expected = "true or false"


@dataclass(frozen=True)
class Word(Kind):
    """A name, of at most 200 characters that can be printed."""

    types = (str,)
    expected = "a name"

    def holds(self, value: Any) -> bool:
        return 0 < len(value) <= 200 and value.isprintable()


@dataclass(frozen=True)
class Null(Kind):
    """Nothing: `expected` says why."""

    types = (type(None),)
    expected: str = "null"


@dataclass(frozen=True)
class Listed(Kind):
    """A list of `least` to `most` values of one kind."""

    types = (list,)
    each: Kind
    least: int
    most: int

    @property
    def expected(self) -> str:
        count = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"a list of {count}, each {self.each.expected}"

    def holds(self, value: Any) -> bool:
        return self.least <= len(value) <= self.most

    def read(self, value: Any, where: str) -> list[Any]:
        return [self.each.read(item, f"{where}[{i}]") for i, item in enumerate(super().read(value, where))]


@dataclass(frozen=True)
class Section(Kind):
    """An object within a file, with fields of its own."""

    types = (dict,)
    expected = "an object"
    fields: Mapping[str, Kind]

    def read(self, value: Any, where: str) -> dict[str, Any]:
        return read_fields(super().read(value, where), self.fields, f"{where}.")


@dataclass(frozen=True)
class Either(Kind):
    """One of several kinds, whose JSON types differ; none is an `Either`."""

    types = ()
    kinds: Sequence[Kind]

    @property
    def expected(self) -> str:
        return " or ".join(kind.expected for kind in self.kinds)

    def read(self, value: Any, where: str) -> Any:
        kind = next((kind for kind in self.kinds if type(value) in kind.types), None)
        return super().read(value, where) if kind is None else kind.read(value, where)


def or_null(kind: Kind) -> Either:
    """`kind`, or null."""
    return Either((kind, Null()))


def read_fields(data: Mapping[str, Any], fields: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """The `fields` that `data`, an object of a JSON file, has, checked and without all others.

    `where` stands before a field's name in messages, as in "checkpoint 'x': config.json: ". Raises `CheckpointError`
    with the file, the field, what was found and what was expected.
    """
    return {name: kind.read(data[name], f"{where}{name}") for name, kind in fields.items() if name in data}


def _shown(value: Any) -> str:
    """`value` as the file has it, cut where it is long."""
    try:
        text = json.dumps(value)
    except ValueError:
        # A number of thousands of digits, which only a program can give.
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
