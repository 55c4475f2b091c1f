"""Numbers that a user gives: of which kind, and from where to where. One message for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError


@dataclass(frozen=True)
class WholeNumber:
    """A whole number from `least` to `most`, of a program (`check`) or of a command line (called with the word)."""

    name: str
    """What messages call it, as in `--repeat`."""
    least: int
    most: int

    def check(self, value: object) -> int:
        """`value` as an int, where it is one of numpy's too; True and 1.0 are none. Raises `UsageError`."""
        number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
        if number is not None and self.least <= number <= self.most:
            return number
        raise UsageError(
            f"{self.name} is {format_value(value)}, expected a whole number from {self.least} to {self.most}."
        )

    def __call__(self, word: str) -> int:
        """The number that `word` says; raises `UsageError`."""
        try:
            return self.check(int(word))
        except ValueError:
            # No number, or one of more digits than Python reads.
            return self.check(word)


@dataclass(frozen=True)
class RealNumber:
    """A finite number from `least` to `most`, of a program (`check`) or of a command line (called with the word)."""

    name: str
    """What messages call it, as in `--temperature`."""
    least: float
    most: float
    expected: str
    """What messages say is expected, as in `more than 0 and at most 1`."""

    def check(self, value: object) -> float:
        """`value` as a float, where it is an int or one of numpy's too; True is none. Raises `UsageError`."""
        try:
            number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
        except OverflowError:
            number = None
        if number is not None and self.least <= number <= self.most:
            return number
        raise UsageError(f"{self.name} is {format_value(value)}, expected {self.expected}.")

    def __call__(self, word: str) -> float:
        """The number that `word` says; raises `UsageError`."""
        try:
            return self.check(float(word))
        except ValueError:
            return self.check(word)
