"""Ranges of numbers, and the errors of commands for numbers outside of them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.checks import RealNumber, WholeNumber
from sinkprune.contract.errors import UsageError

WHOLE = WholeNumber("--count", 1, 100)
REAL = RealNumber("--share", 0.0, sys.float_info.max, "0 or a larger finite number")


@given(st.integers() | st.floats())
def test_numbers_within_the_range_are_taken_and_no_others(number: float) -> None:
    whole = isinstance(number, int) and 1 <= number <= 100
    if whole:
        assert (WHOLE.check(number), WHOLE(repr(number))) == (number, number)
    if 0 <= number <= sys.float_info.max:
        assert (REAL.check(number), REAL(repr(number))) == (float(number), float(number))
    else:
        for refuse in (lambda: REAL.check(number), lambda: REAL(repr(number))):
            with pytest.raises(UsageError, match=r"^--share is .*, expected 0 or a larger finite number\.$"):
                refuse()
    for refuse in () if whole else (lambda: WHOLE.check(number), lambda: WHOLE(repr(number))):
        with pytest.raises(UsageError, match=r"^--count is .*, expected a whole number from 1 to 100\.$"):
            refuse()


def test_what_is_no_number_of_the_kind() -> None:
    for value in (np.int64(3), np.uint8(3), 3):
        assert (type(WHOLE.check(value)), type(REAL.check(value))) == (int, float)
    for wrong in (True, None, "3", b"3", [3], 3 + 0j, 10**5000, np.timedelta64(3, "s"), np.timedelta64(3, "ns")):
        with pytest.raises(UsageError, match="--count is "):
            WHOLE.check(wrong)
        with pytest.raises(UsageError, match="--share is "):
            REAL.check(wrong)
    with pytest.raises(UsageError, match="--count is "):
        WHOLE.check(np.float32(3))
