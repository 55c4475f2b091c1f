"""Check the names and types of function arguments. Messages name the argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, TypeVar, cast

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import OptionError, UsageError

C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")


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
            guess = f"{guessed(name, known) or '.'} Options are: {', '.join(known)}."
            raise OptionError(f"there is no option {format_value(name)}{guess}")


def guessed(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence with the name in `known` that an unknown one may mean; else ""."""
    # 'num_steps' means 'steps', and 'temp' 'temperature', although 'min_steps' and 'system' are closer.
    near = [option for option in known if option in name.split("_") or option.startswith(name)]
    near += get_close_matches(name, known, 1)
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


def creation_checks_options(made: type[T]) -> type[T]:
    """Make the creation of a dataclass raise `OptionError`, with its fields, for keywords that it does not have."""
    made.__init__ = checks_options(made.__init__)  # type: ignore[method-assign]
    return made
