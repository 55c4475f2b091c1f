"""Ranges of numbers, for options of commands and arguments of functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from sinkprune.contract.checks.fields import Bounds, describe, fits
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import UsageError

N = TypeVar("N", int, float)
R = TypeVar("R", bound="_Number[Any]")


def is_number(value: object, kind: type[Any] = Real) -> bool:
    """Return whether `value` is a number of Python or numpy of this abstract kind. True and times are none."""
    # numpy's spans of time count as whole numbers.
    is_time = getattr(getattr(value, "dtype", None), "kind", "") == "m"
    return isinstance(value, kind) and not isinstance(value, bool) and not is_time


@dataclass(frozen=True)
class _Number(Generic[N]):
    """A number from `least` to `most`: an argument (`check`), or a word of a command line (call it)."""

    name: str
    """What messages call it: `--sm`, or `max_new_tokens` in Python and then `--max-new-tokens` in a command."""
    least: N
    most: N
    expected: str = ""
    """The expectation in messages; by default the kind and the bounds."""
    kind: ClassVar[type]
    numbers: ClassVar[type]

    def check(self, value: object) -> N:
        """Return `value`, a number of Python or numpy, as Python's. True is no number. Raises `UsageError`."""
        number, kind = value, Annotated[self.kind, Bounds(self.least, self.most)]
        if is_number(value, self.numbers):
            try:
                number = self.kind(value)
            except OverflowError:
                number = None
        if not fits(kind, number):
            raise UsageError(f"{self.name} is {format_value(value)}, expected {self.expected or describe(kind)}.")
        return number  # type: ignore[return-value]

    def named(self: R, name: str) -> R:
        """Return this range under another `name`, for an option that is spelled otherwise."""
        return replace(self, name=name)

    def __call__(self, word: str) -> N:
        """Return the number that `word` of a command line is; raises `UsageError`, which names the option."""
        option = self if "--" in self.name else self.named(f"--{self.name.replace('_', '-')}")
        try:
            return option.check(self.kind(word))
        except ValueError:
            # No number, or one of more digits than Python reads.
            return option.check(word)


class WholeNumber(_Number[int]):
    """A whole number."""

    kind, numbers = int, Integral


class RealNumber(_Number[float]):
    """A finite number."""

    kind, numbers = float, Real
