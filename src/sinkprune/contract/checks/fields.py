"""Check the kinds of values in JSON files, on command lines and in arguments, with one wording for errors.

A kind is a type: `int`, `float`, `bool`, `str`, `Any`; `list`, `tuple`, `dict` or `Literal` of others; `X | None`.
`Annotated[int, Bounds(1, 64)]` is a whole number from 1 to 64. A dataclass is an object with exactly its fields, of
which it may lack those with the metadata `OPTIONAL`. A TypedDict is an object with its required fields; other fields
are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from sinkprune.contract.checks.format_value import format_value

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The smallest and largest value of a number, or length of a list or of a printable text."""

    least: float
    most: float

    def hold(self, value: Any) -> bool:
        """Return whether `value` is within these bounds; NaN is not."""
        size = value if isinstance(value, (int, float)) else len(value)
        return self.least <= size <= self.most and (not isinstance(value, str) or value.isprintable())


Size = Annotated[int, Bounds(1, 1 << 30)]
"""A number of elements, tokens or rows along one axis."""
Width = Annotated[int, Bounds(1, 1 << 20)]
"""A number of elements of a state."""
Count = Annotated[int, Bounds(0, 1 << 30)]
"""A number of things, possibly 0; also an index or an id."""
Few = Annotated[int, Bounds(1, 1 << 14)]
"""A number of layers, heads, blocks or images."""

OPTIONAL = {"optional": True}
"""The metadata of a dataclass field that objects may lack. Its default is None, which is not written."""

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class SchemaError(ValueError):
    """A JSON value is not of its kind; the message names the place inside the document."""


def to_json(value: Any) -> Any:
    """Return `value` in the types of `json.dumps`: dataclasses become objects, tuples become arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            field.name: to_json(item)
            for field, item in fields.items()
            if item is not None or not field.metadata.get("optional")
        }
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any, where: str = "$") -> T:
    """Return parsed JSON as the dataclass or TypedDict `kind`. Messages name its place `where`.

    Raises:
        SchemaError: a field is missing, unknown to a dataclass, or not of its kind.
    """
    return typing.cast(T, _read(kind, data, where))


def fits(kind: Any, value: object) -> bool:
    """Return whether `value` is a `kind`, without its parts: True is no number, 1.0 no whole one, 1 is a `float`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return fits(arguments[0], value) and arguments[1].hold(value)
    if origin in (typing.Union, types.UnionType):
        return any(fits(one, value) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return kind is Any or type(value) is _json_type(kind)


def describe(kind: Any) -> str:
    """Return the words of messages for a `kind`, as in "a whole number from 1 to 64"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        named = [describe(one) for one in arguments if not (one is int and float in arguments)]
        return " or ".join(dict.fromkeys(named))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is not Annotated:
        return _WORDS[_json_type(kind)]
    inner, bounds = arguments
    ends = [str(end) if isinstance(end, int) else f"{end:g}" for end in (bounds.least, bounds.most)]
    limits = " to ".join(dict.fromkeys(ends))
    if inner is str:
        return f"{limits} printable characters"
    if typing.get_origin(inner) in (list, tuple):
        return f"a list of {limits}, each {describe(typing.get_args(inner)[0])}"
    return f"{describe(inner)} from {limits}"


def _json_type(kind: Any) -> Any:
    """Return the type of parsed JSON values of a kind without bounds or alternatives."""
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return dict
    origin = typing.get_origin(kind) or kind
    return list if origin is tuple else origin


def _read(kind: Any, data: Any, where: str) -> Any:
    if not fits(kind, data):
        raise SchemaError(f"{where}: found {format_value(data)}, expected {describe(kind)}")
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _read(arguments[0], data, where)
    if origin in (typing.Union, types.UnionType):
        fitting = [one for one in arguments if fits(one, data)]
        if isinstance(data, dict) and fitting[1:]:
            # The nearest kind names the field that is missing or unknown.
            fitting.sort(key=lambda one: len(_hints(one).keys() ^ data.keys()))
        return _read(fitting[0], data, where)
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _read_object(kind, data, where)
    if origin is dict:
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin in (list, tuple):
        return origin(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    return float(data) if kind is float else data


def _read_object(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints = _hints(kind)
    for name in _required(kind):
        if name not in data:
            raise SchemaError(f"{where}: missing field '{name}'")
    if dataclasses.is_dataclass(kind):
        for name in data:
            if name not in hints:
                raise SchemaError(f"{where}: unknown field '{name}'")
    return kind(**{name: _read(hints[name], data[name], f"{where}.{name}") for name in hints if name in data})


def _required(kind: Any) -> Iterable[str]:
    """Return the names of the fields that every object of a dataclass or TypedDict has."""
    if dataclasses.is_dataclass(kind):
        return (field.name for field in dataclasses.fields(kind) if not field.metadata.get("optional"))
    return kind.__required_keys__


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the kinds of the fields of a dataclass or TypedDict."""
    return typing.get_type_hints(kind, include_extras=True)
