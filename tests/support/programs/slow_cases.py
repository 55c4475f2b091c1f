"""Parameters of tests: `make pytest` runs a few, and `make test-slow` all others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def slow_except(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of `cases`, each a value or a tuple of values. Those that are not `chosen` are slow."""
    listed = list(cases)
    assert all(case in listed for case in chosen), f"expected cases of {listed}, found {chosen}"
    return [case if case in chosen else slow(case) for case in listed]


def every(nth: int, cases: Iterable[Any]) -> list[Any]:
    """Return the parameters of `cases`. All are slow except the first and every `nth` after it."""
    listed = list(cases)
    return slow_except(listed[::nth], listed)


def each_once(*factors: Iterable[Any]) -> list[Any]:
    """Return the product of the `factors`. All cases are slow but a few, which hold each value once or more."""
    values = [list(factor) for factor in factors]
    few = [tuple(each[place % len(each)] for each in values) for place in range(max(map(len, values)))]
    return slow_except(few, product(*values))


def slow(case: Any) -> Any:
    """Return the parameters of one slow case, a value or a tuple of values."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
