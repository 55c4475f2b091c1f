"""Checks of arguments, options and the fields of files, with errors that name what was found and expected.

A kind is a type: `int`, `float`, `bool`, `str`, `Any`; `list`, `tuple`, `dict` or `Literal` of others; `X | None`.
`Annotated[int, Bounds(1, 64)]` is a whole number from 1 to 64. A dataclass is an object with exactly its fields, of
which it may lack those with the metadata `OPTIONAL`. A TypedDict is an object with its required fields; other fields
are ignored. `Annotated[dict, Imported("package.module:Class")]` is an object of a dataclass.
"""

from __future__ import annotations

import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, Generic, TypeVar, cast

from sinkprune.contract.errors import OptionError, SinkpruneError, UsageError

# C0 and C1, line breaks, changes of the writing direction, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str, keep: str = "") -> str:
    """Return `text` with control characters written as in Python, for example `\\x1b`. Those in `keep` stay.

    File names, manifests, answers and messages of libraries may hold control characters.
    """
    return _CONTROL.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), text
    )


_SHOWN = 80
_LETTERS = re.compile(r"[^\w+]|_")


def counted(count: int, one: str) -> str:
    """Return a count with its noun, as in "1 thread" and "2 threads"."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def duration(seconds: float) -> str:
    """Return seconds in words: as minutes above two minutes, and as hours above two hours."""
    if seconds <= 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds <= 7200 else f"{seconds / 3600:.1f} h"


def type_name(value: object) -> str:
    """Return the name of a value's type, for values whose text would say little, such as tensors; "None" for None."""
    return "None" if value is None else type(value).__name__


def format_value(value: object) -> str:
    """Return a value on one line: texts in quotes, long values cut off."""
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return f"a number of more than {_SHOWN} digits"
    try:
        text = " ".join((str(value) if isinstance(value, Real) else repr(value)).split())
    except ValueError:
        # Python rejects the conversion of numbers with thousands of digits.
        return f"{type_name(value)} with a number of more than {_SHOWN} digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """The smallest and largest value of a number, or length of a list or of a printable text."""

    least: float
    most: float

    def hold(self, value: Any) -> bool:
        """Return whether `value` is within these bounds; NaN is not."""
        size = value if isinstance(value, (int, float)) else len(value)
        return self.least <= size <= self.most and (not isinstance(value, str) or value.isprintable())


@dataclass(frozen=True)
class Imported:
    """A dataclass that is imported with the first object of its kind, for example the facts of a policy."""

    place: str
    """Its module and name, as in `package.module:Class`."""

    def hold(self, value: Any) -> bool:
        """Return True: `from_json` checks the object's fields."""
        return True

    def load(self) -> Any:
        """Return the dataclass."""
        # Commands start with few modules.
        from sinkprune.contract.registry import load_object

        return load_object(self.place)


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
    if is_dataclass(value) and not isinstance(value, type):
        found = {field: getattr(value, field.name) for field in fields(value)}
        return {
            field.name: to_json(item)
            for field, item in found.items()
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
    return cast(T, _read(kind, data, where))


def fits(kind: Any, value: object) -> bool:
    """Return whether `value` is a `kind`, without its parts: True is no number, 1.0 no whole one, 1 is a `float`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return fits(arguments[0], value) and arguments[1].hold(value)
    if origin in (typing.Union, UnionType):
        return any(fits(one, value) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
    return kind is Any or type(value) is _json_type(kind)


def describe(kind: Any) -> str:
    """Return the words of messages for a `kind`, as in "a whole number from 1 to 64"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        named = [describe(one) for one in arguments if not (one is int and float in arguments)]
        return " or ".join(dict.fromkeys(named))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is not Annotated:
        return _WORDS[_json_type(kind)]
    inner, bounds = arguments
    if isinstance(bounds, Imported):
        return describe(inner)
    ends = [str(end) if isinstance(end, int) else f"{end:g}" for end in (bounds.least, bounds.most)]
    limits = " to ".join(dict.fromkeys(ends))
    if inner is str:
        return f"{limits} printable characters"
    if typing.get_origin(inner) in (list, tuple):
        return f"a list of {limits}, each {describe(typing.get_args(inner)[0])}"
    return f"{describe(inner)} from {limits}"


def _json_type(kind: Any) -> Any:
    """Return the type of parsed JSON values of a kind without bounds or alternatives."""
    if is_dataclass(kind) or typing.is_typeddict(kind):
        return dict
    origin = typing.get_origin(kind) or kind
    return list if origin is tuple else origin


def _read(kind: Any, data: Any, where: str) -> Any:
    if not fits(kind, data):
        raise SchemaError(f"{where}: found {format_value(data)}, expected {describe(kind)}")
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        inner, detail = arguments
        return _read(detail.load() if isinstance(detail, Imported) else inner, data, where)
    if origin in (typing.Union, UnionType):
        fitting = [one for one in arguments if fits(one, data)]
        if isinstance(data, dict) and fitting[1:]:
            # The nearest kind names the field that is missing or unknown.
            fitting.sort(key=lambda one: len(_hints(one).keys() ^ data.keys()))
        return _read(fitting[0], data, where)
    if is_dataclass(kind) or typing.is_typeddict(kind):
        return _read_object(kind, data, where)
    if origin is dict:
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin in (list, tuple):
        return origin(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    return float(data) if kind is float else data


def _read_object(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints, required = _hints(kind), getattr(kind, "__required_keys__", ())
    if is_dataclass(kind):
        required = [field.name for field in fields(kind) if not field.metadata.get("optional")]
    for name in required:
        if name not in data:
            raise SchemaError(f"{where}: missing field '{name}'")
    for name in data if is_dataclass(kind) else ():
        if name not in hints:
            raise SchemaError(f"{where}: unknown field '{name}'")
    return kind(**{name: _read(hints[name], data[name], f"{where}.{name}") for name in hints if name in data})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the kinds of the fields of a dataclass or TypedDict."""
    return typing.get_type_hints(kind, include_extras=True)


N = TypeVar("N", int, float)
R = TypeVar("R", bound="_Number[Any]")


def is_number(value: object, kind: type[Any] = Real) -> bool:
    """Return whether `value` is a number of Python or numpy of this abstract kind. True and times are none."""
    # numpy's spans of time count as whole numbers.
    is_time = getattr(getattr(value, "dtype", None), "kind", "") == "m"
    return isinstance(value, kind) and not isinstance(value, bool) and not is_time


@dataclass(frozen=True)
class _Number(Generic[N]):
    """A number from `least` to `most`: an argument (`check`), or a word of a command line (call it)."""

    name: str
    """What messages call it: `--sm`, or `max_new_tokens` in Python and then `--max-new-tokens` in a command."""
    least: N
    most: N
    expected: str = ""
    """The expectation in messages; by default the kind and the bounds."""
    kind: ClassVar[type]
    numbers: ClassVar[type]

    def check(self, value: object) -> N:
        """Return `value`, a number of Python or numpy, as Python's. True is no number. Raises `UsageError`."""
        number, kind = value, Annotated[self.kind, Bounds(self.least, self.most)]
        if is_number(value, self.numbers):
            try:
                number = self.kind(value)
            except OverflowError:
                number = None
        if not fits(kind, number):
            raise UsageError(f"{self.name} is {format_value(value)}, expected {self.expected or describe(kind)}.")
        return number  # type: ignore[return-value]

    def named(self: R, name: str) -> R:
        """Return this range under another `name`, for an option that is spelled otherwise."""
        return replace(self, name=name)

    def __call__(self, word: str) -> N:
        """Return the number that `word` of a command line is; raises `UsageError`, which names the option."""
        option = self if "--" in self.name else self.named(f"--{self.name.replace('_', '-')}")
        try:
            return option.check(self.kind(word))
        except ValueError:
            # No number, or one of more digits than Python reads.
            return option.check(word)


class WholeNumber(_Number[int]):
    """A whole number."""

    kind, numbers = int, Integral


class RealNumber(_Number[float]):
    """A finite number."""

    kind, numbers = float, Real


def set_numbers(owner: Any, numbers: Iterable[_Number[Any]]) -> None:
    """Turn the fields of a frozen dataclass into Python's numbers; raises `UsageError` out of range.

    `numbers` have the names of fields. None stays where it is the default.
    """
    defaults = {field.name: field.default for field in fields(owner)}
    for number in numbers:
        value = getattr(owner, number.name)
        if value is not None or defaults[number.name] is not None:
            object.__setattr__(owner, number.name, number.check(value))


C = TypeVar("C", bound=Callable[..., Any])


def check_path(name: str, value: object) -> None:
    """Raise `TypeError` for a value that is no path."""
    check_type(name, value, (str, os.PathLike), "a str or a path")


def check_callable(name: str, value: object) -> None:
    """Raise `TypeError` for a value that cannot be called."""
    if not callable(value):
        raise TypeError(f"{name} is {format_value(value)}, expected a function.")


def check_type(name: str, value: object, kinds: tuple[type[Any], ...], expected: str) -> None:
    """Raise `TypeError` for a value of none of `kinds`, which the message calls `expected`."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {format_value(value)}, expected {expected}.")


def check_plan_names(budget: object, method: object) -> None:
    """Raise `UsageError` for a budget or a method that is no text."""
    for name, value, example in (("budget", budget, "retain-64"), ("method", method, "sinkpruner")):
        if not isinstance(value, str):
            raise UsageError(f"{name} is {format_value(value)}, expected a name, as in '{example}'.")


def check_options(
    given: Iterable[str], known: Sequence[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise `OptionError`, with the `known` names, for names of options that are not known.

    `elsewhere` has the functions of other options, by their names.
    """
    for name in given:
        if name not in known:
            if name in elsewhere:
                raise OptionError(f"{name} is an option of {elsewhere[name]}. Give it there.")
            raise OptionError(unknown_name(f"there is no option {format_value(name)}", name, known, "Options are"))


def unknown_name(found: str, name: object, known: Iterable[str], listed: str) -> str:
    """Return a message for a `name` that is not `known`: the one that it may mean, and all that are known.

    `found` is its beginning, as in "unknown board 'orin'", and `listed` what stands before the list of known names.
    """
    known = list(known)
    return f"{found}{guessed(name, known) or '.'} {listed}: {', '.join(known)}."


def guessed(name: object, known: Iterable[str]) -> str:
    """Return the end of a sentence with the name in `known` that an unknown one may mean; else "".

    Case, and signs between words and digits, make no difference: 'Retain_64' means 'retain-64', and 'pi05' 'pi0.5'.
    """
    if not isinstance(name, str) or not name:
        return ""
    plain = {_LETTERS.sub("", one.casefold()): one for one in known}
    word, parts = _LETTERS.sub("", name.casefold()), name.split("_")
    # 'num_steps' means 'steps', and 'temp' 'temperature', although 'min_steps' and 'system' are closer.
    near = [one for text, one in plain.items() if one in parts or (word and text.startswith(word))]
    near += [plain[text] for text in get_close_matches(word, plain, 1)]
    return f"; did you mean '{near[0]}'?" if near else ""


def checks_options(function: C) -> C:
    """Make calls of `function` raise `OptionError`, with its options, for keywords that it does not have."""
    return checks_options_and({})(function)


def checks_options_and(elsewhere: Mapping[str, str]) -> Callable[[C], C]:
    """Return `checks_options` for a function, some of whose users look for options of others; see `check_options`."""

    def decorate(function: C) -> C:
        known = [name for name in signature(function).parameters if name not in ("self", "cls")]

        @wraps(function)
        def checked(*given: Any, **options: Any) -> Any:
            check_options(options, known, elsewhere)
            return function(*given, **options)

        return cast(C, checked)

    return decorate


def shows_fields(kind: type[Any]) -> Callable[[C], C]:
    """Return a decorator: the signature of the function has the fields of a dataclass in the place of `**options`."""

    def decorate(function: C) -> C:
        own = signature(function)
        named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in fields(kind)
        ]
        function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
        return function

    return decorate


def creation_checks_options(made: type[T]) -> type[T]:
    """Make the creation of a dataclass raise `OptionError`, with its fields, for keywords that it does not have."""
    made.__init__ = checks_options(made.__init__)  # type: ignore[method-assign]
    return made


@contextmanager
def needs_package(doing: str, install: str, error: type[SinkpruneError] = UsageError) -> Iterator[None]:
    """Raise `error` if the block imports a package that is not installed: what it is for, and how to `install` it."""
    try:
        yield
    except ImportError as missing:
        raise error(
            f"{doing} needs the package '{missing.name}', which is not installed. Install it with: {install}"
        ) from missing


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package.

    It never has the package's name: no registry has this package, so a stranger may register the name there.
    """
    return f"pip install --editable '.[{extra}]' (in the clone)"


_PACKAGE = str(Path(__file__).parents[1])


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with `message` at the innermost line on the stack that is outside of this package."""
    level, frame = 1, sys._getframe()
    # Python's own frozen modules run generators.
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<frozen")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
