"""The Jinja environment of chat templates: an allow-list of operations, and a limit on computation.

A template is an untrusted program. It can use only the filters and methods of published templates, and the tests of
Jinja, with the results of transformers. The size of an operation's values is counted before the operation runs, so
that a rendering ends soon and stays small.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from copy import copy
from datetime import datetime
from functools import wraps
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace

_UNITS, _UNITS_A_CHARACTER = 1 << 20, 64
"""The units that a rendering may spend, and the further units for each character of the conversation. Reading a value
costs 8 units and one for each of its characters. Published templates spend some thousands."""
_BITS, _DATE_CHARACTERS = 1024, 100
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float indent int items join last length list lower map "
    "max min reject rejectattr replace reverse round safe select selectattr sort string title trim upper "
    "wordcount"
)
_METHODS = (
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join lower lstrip "
    "partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines startswith strip "
    "title upper"
)
_PRODUCTS = "* indent join lstrip replace rfind rpartition rsplit rstrip round strip tojson trim"
"""Operations that may produce or compare up to the product of the sizes of their values."""
_LOOP = "changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"
_ATTRIBUTES = [(str, _METHODS.split()), (dict, ["get", "items", "keys", "values"]), (LoopContext, _LOOP.split())]


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers configures it for chat templates, with a limit on the computation of a rendering."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, extensions: list[Any]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self.read, extensions=extensions
        )
        self._units = 0
        filters: dict[str, Any] = {**{name: FILTERS[name] for name in _FILTERS.split()}, "tojson": _tojson}
        self.filters = {name: self._counted(name, function) for name, function in filters.items()}
        tests: dict[str, Any] = {**TESTS}
        self.tests = {name: self._counted(name, function) for name, function in tests.items()}
        self.globals = {
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "range": safe_range,
            "strftime_now": _strftime_now,
        }

    def begin(self, characters: int) -> None:
        """Reset the counter for a conversation of so many characters."""
        self._units = _UNITS + _UNITS_A_CHARACTER * characters

    def spend(self, units: int) -> bool:
        """Count `units` and return True, for use in conditions. Raises `TemplateError` when all units are spent."""
        self._units -= units
        if self._units < 0:
            raise TemplateError("it computes too much: it takes too long, or makes too much text")
        return True

    def read(self, value: Any) -> Any:
        """Return `value` after counting all its parts. A part that occurs twice counts twice."""
        if isinstance(value, str):
            self.spend(8 + len(value))
        elif isinstance(value, int):
            self.spend(8 + value.bit_length() // 3)
        else:
            self.spend(8)
            for part in _parts(value):
                self.read(part)
        return value

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter or test `function`, which now counts its values before it runs."""
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            self._count(name, arguments[passed:], options)
            result = function(*arguments, **options)
            # A lazy result would be read uncounted later.
            return iter(list(result)) if isinstance(result, Iterator) else result

        return counted

    def _count(self, name: str, values: tuple[Any, ...], options: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Count the values of an operation, and the size of its result."""
        given = [self.read(value) for value in (*values, *options.values())]
        if name not in _PRODUCTS.split():
            return
        first, *others = (abs(value) if isinstance(value, int) else len(str(value)) for value in given)
        if name == "replace" and len(values) > 2:
            first = str(values[0]).count(str(values[1]))
        self.spend((1 + first) * sum(others))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count and run a call of a macro, a method or a function. The base class sets the names."""
        owner = getattr(__obj, "__self__", None)
        # Jinja's own options begin with an underscore.
        options = {name: value for name, value in kwargs.items() if not name.startswith("_")}
        if isinstance(owner, str):
            __self._count(__obj.__name__, (owner, *args), options)
        else:
            __self._count("", args, options)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Count and compute `left operator right`."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        self._count("" if numbers else operator, (left, right))
        if operator == "%" and isinstance(left, str):
            raise SecurityError("'%' would format text")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _BITS:
                raise TemplateError(f"it computes a number of more than {_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]` after counting the key, whose hash takes as long as the key has parts."""
        return super().getitem(obj, self.read(argument))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether templates may read the attribute `attr` of `obj`. Keys of a dict are no attributes."""
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return any(isinstance(obj, kind) and attr in names for kind, names in _ATTRIBUTES)

    def wrap_str_format(self, value: Any) -> None:
        """Return None: `format` is a method like any other, and is not on the list."""


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return (part for pair in value.items() for part in pair)
    if isinstance(value, Iterator):
        # Filters return iterators of lists, so a copy reads the same items.
        return copy(value)
    return value if isinstance(value, (list, tuple, range, KeysView, ValuesView, ItemsView)) else ()


class _Namespace(Namespace):
    def __getattribute__(self, name: str) -> Any:
        """Hide special methods that a template sets, because Markup would call them uncounted."""
        if name.startswith("__") and name != "__class__":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Return a constant, because the values of a namespace are not counted with it."""
        return "<Namespace>"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, as transformers does. Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: Any) -> str:
    if len(str(format)) > _DATE_CHARACTERS:
        raise TemplateError(f"it writes the date in a form of more than {_DATE_CHARACTERS} characters")
    return datetime.now().strftime(format)
