"""Wall-clock times of a request's parts, in the device's own time: measuring never makes the host wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Clock(Protocol):
    """What a stopwatch reads; every `Backend` is one."""

    def mark(self) -> Any:
        """The moment at which all work enqueued before is done."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks; waits for the second."""


class Stopwatch:
    """Milliseconds by name; parts of one name add up, and parts may lie within others."""

    def __init__(self, clock: Clock, during: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        """`during` is entered with the name of each block that is measured, around it."""
        self._clock, self._during = clock, during
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time the block takes to `name`."""
        with self._during(name):
            start = self._clock.mark()
            try:
                yield
            finally:
                self._spans.append((name, start, self._clock.mark()))

    def ms(self) -> dict[str, float]:
        """Milliseconds by name; waits for the work measured."""
        milliseconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            milliseconds[name] += self._clock.elapsed_ms(start, end)
        return dict(milliseconds)
