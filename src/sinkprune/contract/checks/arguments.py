"""What programs give to functions: that it is of the kind expected, told at the call by the argument's name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import OptionError


def check_path(name: str, value: object) -> None:
    """Refuse what is no path; raises `TypeError`."""
    check_type(name, value, (str, os.PathLike), "a str or a path")


def check_callable(name: str, value: object) -> None:
    """Refuse what cannot be called; raises `TypeError`."""
    if not callable(value):
        raise TypeError(f"{name} is {format_value(value)}, expected a function.")


def check_type(name: str, value: object, kinds: tuple[type[Any], ...], expected: str) -> None:
    """Refuse what is of none of `kinds`, which the message calls `expected`; raises `TypeError`."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {format_value(value)}, expected {expected}.")


def check_options(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names of options that are not among `known`; raises `OptionError`, which lists those there are."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            guess = f"; did you mean '{near[0]}'?" if near else "."
            raise OptionError(f"there is no option {format_value(name)}{guess} Options are: {', '.join(known)}.")
