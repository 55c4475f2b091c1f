"""Check the types of function arguments. Messages name the argument."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import OptionError


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


def check_options(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `OptionError`, with the `known` names, for names of options that are not known."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            guess = f"; did you mean '{near[0]}'?" if near else "."
            raise OptionError(f"there is no option {format_value(name)}{guess} Options are: {', '.join(known)}.")
