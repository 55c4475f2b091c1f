"""What chat templates may call: filters, tests, functions and methods, each paid for in steps and characters.

A template is a program that a stranger wrote. It gets what published templates use, and what transformers gives
them, each with the same results; nothing else can be reached.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from markupsafe import Markup

from sinkprune.runtime.text.template_meter import BoundError, Meter, meter_of

_LAZY = "count d default first items last length list map reject rejectattr reverse select selectattr"
_COMPARING = "== != > >= < <= eq equalto ne gt greaterthan ge lt lessthan le in lower upper divisibleby"
_TEXT_METHODS = (
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
    "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition "
    "rsplit rstrip split splitlines startswith strip swapcase title upper"
)
_LOOP = "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"
_ATTRIBUTES: list[tuple[type, frozenset[str]]] = [
    (str, frozenset(_TEXT_METHODS.split())),
    (LoopContext, frozenset(_LOOP.split())),
    (dict, frozenset(["copy", "get", "items", "keys", "values"])),
    (list, frozenset(["count", "index"])),
    (tuple, frozenset(["count", "index"])),
]
_STRIPPED = 64
_DATE = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%]){0,100}", re.DOTALL)
_INDENT = 32


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, less what no chat template needs, and metered."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, extensions: list[Any]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        lazy = {name: _paid(FILTERS[name], _walk) for name in _LAZY.split()}
        reading = {name: _paid(FILTERS[name], pay) for name, pay in _READING.items()}
        own = {"indent": _indent, "join": _join, "replace": _replace, "tojson": _tojson}
        self.filters = {**lazy, **reading, **own}
        comparing = _COMPARING.split()
        self.tests = {name: _paid(test, _read if name in comparing else _look) for name, test in TESTS.items()}
        self.globals = {
            "dict": _dict,
            "namespace": _namespace,
            "raise_exception": _raise_exception,
            "range": _range,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether `attr` is one that templates may have of `obj`; keys of a dict are no attributes."""
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

    def wrap_str_format(self, value: Any) -> None:
        """Nothing: `format` is a method as any other, and none of those templates may have."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`. Raises `SecurityError` for keys with parts: looking one up takes as long as they like."""
        if not isinstance(argument, (str, int, float, slice, Undefined)) and argument is not None:
            raise SecurityError(f"a {type(argument).__name__} is no key or index")
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, paid for by what it will make."""
        meter = meter_of(context)
        meter.step(1)
        if isinstance(left, str) and operator == "%":
            raise SecurityError("'%' would format text")
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            meter.number(_bits(operator, left, right))
        elif operator == "*":
            many, count = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(many, (str, list, tuple)) and isinstance(count, int):
                (meter.make if isinstance(many, str) else meter.step)(len(many) * max(count, 0))
        elif isinstance(left, str) and isinstance(right, str):
            escaped = isinstance(left, Markup) or isinstance(right, Markup)
            meter.make((len(left) + len(right)) * (6 if escaped else 1))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            meter.step(len(left) + len(right))
        elif not (_is_operand(left) and _is_operand(right)):
            raise SecurityError(f"'{operator}' of {type(left).__name__} and {type(right).__name__}")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """What calling a macro, a method or one of the functions gives, paid for. Names as in the base class."""
        meter = meter_of(__context)
        meter.step(4)
        if not isinstance(__obj, (Macro, LoopContext, Undefined)) and __obj not in __self._functions():
            args = tuple(map(meter.whole, args))
            owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
            if isinstance(owner, str):
                _pay_text_method(meter, owner, name, args)
            elif isinstance(owner, (list, tuple, dict)):
                meter.step(len(owner)) if isinstance(owner, dict) else meter.read(owner)
            elif not isinstance(owner, LoopContext):
                raise SecurityError(f"a {type(__obj).__name__} cannot be called")
            for argument in (*args, *kwargs.values()):
                meter.read(argument)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def _functions(self) -> Any:
        return self.globals.values()


def _paid(function: Any, pay: Callable[..., None]) -> Callable[..., Any]:
    """`function`, a filter or test of Jinja's, with `pay` before it and its result paid for after."""
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @wraps(function)
    def paid(context: Context, value: Any = None, *arguments: Any, **options: Any) -> Any:
        meter = meter_of(context)
        value = value if pay is _look else meter.whole(value)
        pay(meter, value, *arguments, **options)
        passed = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        given = [passed[kind]] if kind else []
        return meter.made(function(*given, value, *arguments, **options))

    return paid


def _look(meter: Meter, *_: Any, **__: Any) -> None:
    """What is asked is what kind of value it is."""
    meter.step(2)


def _walk(meter: Meter, value: Any, *arguments: Any, **options: Any) -> None:
    """The value is gone through, but not its parts."""
    meter.step(4 + (len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0))


def _read(meter: Meter, value: Any, *arguments: Any, **options: Any) -> None:
    meter.step(4)
    for read in (value, *arguments, *options.values()):
        meter.read(read)


def _copy(meter: Meter, value: Any, *arguments: Any, **options: Any) -> None:
    """The text of the value is written anew, each character as six at the most."""
    _read(meter, value, *arguments, **options)
    meter.make(6 * meter.read(value))


def _order(meter: Meter, value: Any, *arguments: Any, **options: Any) -> None:
    """Items are compared with each other, some twenty times each."""
    _read(meter, value, *arguments, **options)
    meter.step(20 * len(value) if isinstance(value, (list, tuple, dict, range, str)) else 0)
    meter.make(meter.read(value))


def _cut(meter: Meter, value: Any, *arguments: Any, **options: Any) -> None:
    """The text is cut into words, which are an object each."""
    _copy(meter, value)
    meter.step(len(value) if isinstance(value, str) else 0)


def _strip(meter: Meter, value: Any, chars: Any = None) -> None:
    _copy(meter, value, chars)
    if isinstance(chars, str) and len(chars) > _STRIPPED:
        raise BoundError(f"it strips more than {_STRIPPED} different characters")


def _parse(meter: Meter, value: Any, *arguments: Any, **options: Any) -> None:
    _read(meter, value, *arguments, **options)
    if isinstance(value, str):
        # A digit has five bits at the most, in the base of 36.
        meter.number(len(value) if len(value) > 400 else 0)


def _round(meter: Meter, value: Any, precision: Any = 0, method: Any = "common") -> None:
    _read(meter, value, method)
    if isinstance(precision, int):
        meter.number(4 * abs(precision))


_READING: dict[str, Callable[..., None]] = {
    "abs": _read,
    **dict.fromkeys(["capitalize", "e", "escape", "lower", "safe", "string", "upper"], _copy),
    **dict.fromkeys(["dictsort", "max", "min", "sort", "unique"], _order),
    **dict.fromkeys(["float", "int"], _parse),
    **dict.fromkeys(["title", "wordcount"], _cut),
    "round": _round,
    "trim": _strip,
}
"""How filters that read all of their value are paid for."""


def _pay_text_method(meter: Meter, text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Pay for the method `name` of `text`, before it is called."""
    meter.make(3 * meter.read(text))
    first = arguments[0] if arguments else None
    if name == "replace" and len(arguments) > 1:
        _pay_replacing(meter, text, first, arguments[1])
    elif name == "join":
        for part in first if isinstance(first, (list, tuple, dict)) else ():
            meter.make(len(text) + 6 * meter.read(part))
    elif name in ("split", "rsplit", "splitlines"):
        meter.step(text.count(first) if isinstance(first, str) and first else len(text))
    elif name.endswith("strip"):
        _strip(meter, "", first)


def _pay_replacing(meter: Meter, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        escaped = 6 if isinstance(text, Markup) else 1
        meter.make((len(text) + text.count(old) * len(new)) * escaped)


def _bits(operator: str, left: int | float, right: int | float) -> int:
    """The most bits of the whole number `left operator right`."""
    if not isinstance(left, int) or not isinstance(right, int):
        return 0
    if operator == "**":
        return left.bit_length() * max(right, 0)
    return left.bit_length() + right.bit_length()


def _is_operand(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, list, tuple, dict, Undefined))


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    meter = meter_of(context)
    meter.step(4)
    text, former, latter = meter.text(value), meter.text(old), meter.text(new)
    _pay_replacing(meter, text, former, latter)
    return text.replace(former, latter, -1 if count is None else count)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    meter = meter_of(context)
    meter.step(4)
    items = meter.items(value)
    if attribute is not None:
        items = [make_attrgetter(context.environment, attribute)(item) for item in items]
    texts, between = [meter.text(item) for item in items], meter.text(d)
    meter.make(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


@pass_context
def _indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    meter = meter_of(context)
    text, size = meter.text(s), len(width) if isinstance(width, str) else width
    if size > _INDENT:
        raise BoundError(f"it indents by more than {_INDENT}")
    lines = len(text) if not text.isascii() else sum(text.count(end) for end in "\n\r\v\f\x1c\x1d\x1e")
    meter.step(4 + lines)
    meter.make(len(text) + (lines + 1) * max(size, 0))
    indented: str = FILTERS["indent"](text, width, first, blank)
    return indented


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers gives it to templates: Jinja's own would escape HTML."""
    meter = meter_of(context)
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _INDENT or any(len(separator) > _INDENT for separator in separators or ()):
        raise BoundError(f"it writes JSON with an indent or separators of more than {_INDENT}")
    before = meter.steps
    # An item is indented by what it is nested in; a character may be written as two of six.
    characters = 2 * meter.read(value)
    meter.make(characters + (before - meter.steps) * _INDENT * (2 + max(width, 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _range(context: Context, *bounds: int) -> range:
    made = range(*bounds)
    if len(made) > 100_000:
        raise BoundError("it counts further than 100000")
    return made


@pass_context
def _dict(context: Context, *parts: Any, **named: Any) -> dict[Any, Any]:
    meter = meter_of(context)
    parts = tuple(map(meter.whole, parts))
    for part in (*parts, *named.values()):
        meter.read(part)
    return dict(*parts, **named)


class _Namespace(Namespace):
    """Names that begin with an underscore are Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold '{name}'")
        super().__setitem__(name, value)


@pass_context
def _namespace(context: Context, *parts: Any, **named: Any) -> Namespace:
    made = _Namespace()
    for name, value in _dict(context, *parts, **named).items():
        made[name] = value
    return made


@pass_context
def _raise_exception(context: Context, message: Any) -> None:
    raise TemplateError(meter_of(context).text(message))


@pass_context
def _strftime_now(context: Context, format: Any) -> str:
    if not _DATE.fullmatch(meter_of(context).text(format)):
        raise BoundError("it writes the date in a form of more than 100 parts, or by directives with a width")
    return datetime.now().strftime(format)
