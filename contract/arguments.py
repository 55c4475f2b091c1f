"""What programs give to functions: that it is of the kind expected, told at the call by the argument's name."""

from __future__ import annotations

import os
from typing import Any

from sinkprune.contract.shown import shown


def check_path(name: str, value: object) -> None:
    """Refuse what is no path; raises `TypeError`."""
    check_type(name, value, (str, os.PathLike), "a str or a path")


def check_callable(name: str, value: object) -> None:
    """Refuse what cannot be called; raises `TypeError`."""
    if not callable(value):
        raise TypeError(f"{name} is {shown(value)}, expected a function.")


def check_type(name: str, value: object, kinds: tuple[type[Any], ...], expected: str) -> None:
    """Refuse what is of none of `kinds`, which the message calls `expected`; raises `TypeError`."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {shown(value)}, expected {expected}.")
