"""Dataclasses from JSON and back, strictly: what is unknown, missing, of the wrong type or out of bounds is refused.

`Annotated[int, Bounds(1, 64)]` is a field whose value must be a whole number from 1 to 64.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

from sinkprune.contract.checks.format_value import format_value

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The smallest and the largest number that a field may hold."""

    least: float
    most: float


Size = typing.Annotated[int, Bounds(1, 1 << 30)]
"""How many elements, tokens or rows something has along one axis."""
Width = typing.Annotated[int, Bounds(1, 1 << 20)]
"""How many elements a state has."""
Count = typing.Annotated[int, Bounds(0, 1 << 30)]
"""How many of something there are, possibly none; also an index or an id."""
Few = typing.Annotated[int, Bounds(1, 1 << 14)]
"""How many layers, heads, blocks or images there are: few."""


class SchemaError(ValueError):
    """A JSON value does not fit its dataclass; the message names the place inside the document."""


def to_json(value: Any) -> Any:
    """`value` as what `json.dumps` takes: dataclasses become objects, tuples become arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any, where: str = "$") -> T:
    """An instance of the dataclass `kind` from parsed JSON.

    Raises:
        SchemaError: `data` has a field too many, a field too few, or a value of another type.
    """
    return typing.cast(T, _read(kind, data, where))


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin is typing.Annotated:
        return _bounded(_read(arguments[0], data, where), arguments[1], where)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        return _read(kinds[0] if len(kinds) == 1 else _kind_of(kinds, data, where), data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise SchemaError(
                f"{where}: found {format_value(data)}, expected one of {', '.join(map(repr, arguments))}"
            )
        return data
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, data, where)
    if origin is dict:
        _expect(dict, data, where)
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin in (list, tuple):
        _expect(list, data, where)
        return origin(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _expect(kind, data, where)
    return _to_float(data, where) if kind is float else data


def _read_object(kind: Any, data: Any, where: str) -> Any:
    _expect(dict, data, where)
    hints = _hints(kind)
    missing = [name for name in hints if name not in data]
    unknown = [name for name in data if name not in hints]
    if missing:
        raise SchemaError(f"{where}: missing field '{missing[0]}'")
    if unknown:
        raise SchemaError(f"{where}: unknown field '{unknown[0]}'")
    return kind(**{name: _read(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass, with their bounds."""
    return typing.get_type_hints(kind, include_extras=True)


def _kind_of(kinds: list[Any], data: Any, where: str) -> Any:
    """The one of several dataclasses whose fields are nearest to those of `data`."""
    _expect(dict, data, where)
    # Of none's fields exactly: the nearest is read, which names the field that is missing or unknown.
    return min(kinds, key=lambda kind: len(set(_hints(kind)) ^ set(data)))


def _bounded(value: float, bounds: Bounds, where: str) -> float:
    if not bounds.least <= value <= bounds.most:
        raise SchemaError(f"{where}: found {format_value(value)}, expected {bounds.least} to {bounds.most}")
    return value


def _to_float(data: int | float, where: str) -> float:
    try:
        return float(data)
    except OverflowError as error:
        raise SchemaError(f"{where}: found a number of {len(str(data))} digits, too large for a float") from error


def _expect(kind: type, data: Any, where: str) -> None:
    number = kind is float and isinstance(data, int)
    if isinstance(data, bool) != (kind is bool) or not (isinstance(data, kind) or number):
        raise SchemaError(f"{where}: found {format_value(data)}, expected {kind.__name__}")
