"""Ranges of numbers, and the errors of commands for numbers outside of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.checks import RealNumber, WholeNumber, format_value
from sinkprune.contract.errors import UsageError
from support.programs.commands import assert_refused, run

WHOLE = WholeNumber("--count", 1, 100)
REAL = RealNumber("--share", 0.0, sys.float_info.max, "0 or a larger finite number")
_DIGITS = "9" * 10_000


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


@given(st.text())
def test_any_word_is_read_or_refused_on_one_line(word: str) -> None:
    for read in (WHOLE, REAL):
        try:
            read(word)
        except UsageError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 150


def test_long_values_are_shown_by_their_beginning() -> None:
    assert format_value("x" * 100) == "'" + "x" * 79 + "..."
    assert format_value([10**5000]) == "list with a number of more than 80 digits"
    assert format_value(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"


_HUGE = "1" + "0" * 30
WRONG = {
    "sinkprune-run": {
        "--max-new-tokens": ["0", "1e3", _DIGITS, "many"],
        "--threads": [_HUGE],
        "--seed": ["-1", "1.5"],
        "--temperature": ["nan", "1e999", "warm"],
        "--top-p": ["0", "1.1"],
    },
    "sinkprune-profile": {
        "--repeat": ["0", _DIGITS],
        "--warmup-rounds": ["-1"],
        "--new-tokens": ["0"],
        "--threads": ["0"],
    },
    "sinkprune-evaluate": {"--limit": ["0"], "--max-new-tokens": ["0"], "--threads": ["-1"]},
    "sinkprune-calibrate norms": {"--threads": [_HUGE]},
    "sinkprune-build": {
        "--sm": ["99999999", "0", _DIGITS, "86,x", "-86"],
        "--max-prompt": [_HUGE],
        "--max-new-tokens": ["-1"],
        "--max-images": ["0"],
    },
    "sinkprune-export": {
        "--max-images": ["0"],
        "--max-frames": ["-1"],
        "--min-pixels": [_HUGE],
        "--max-pixels": ["0"],
    },
}
_CASES = [(command, option, value) for command, own in WRONG.items() for option in own for value in own[option]]


@pytest.mark.parametrize(("command", "option", "value"), _CASES, ids=lambda word: word[:20])
def test_options_out_of_range_are_refused_before_anything_is_opened(
    command: str, option: str, value: str, tmp_path: Path
) -> None:
    # Neither bundle nor picture exist: other checks would report that first.
    ask, output = ("--image", tmp_path / "x.png", "--prompt", "What?"), ("-o", tmp_path / "out")
    needed: dict[str, tuple[object, ...]] = {
        "sinkprune-run": ask,
        "sinkprune-profile": ask,
        "sinkprune-build": (*output, "--target", "onnxruntime"),
        "sinkprune-export": output,
    }
    refused = run(*command.split(), tmp_path / "none", *needed.get(command, ()), f"{option}={value}")
    assert_refused(refused, "expected")
    assert option.strip("-") in refused.stderr.replace(" ", "-")
    assert list(tmp_path.iterdir()) == []
