"""What long work reports while it runs."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float, float, str], None]
"""Receives the name of the present part of the work, how many of its steps are done, how many there probably are, and
what a step is, in the plural. A new name begins a new part."""


def unreported(what: str, done: float, total: float, unit: str) -> None:
    """Report nothing: an `OnProgress`."""


def reporting(given: object) -> OnProgress:
    """Return `given` if it can be called, as an `OnProgress`, else `unreported`."""
    return given if callable(given) else unreported
