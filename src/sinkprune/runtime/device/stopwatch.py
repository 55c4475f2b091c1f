"""Times of a request's parts by the device's own clock, so that measuring never makes the host wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Clock(Protocol):
    """The clock of a stopwatch. Every `Backend` is one."""

    mark: Callable[[], Any]
    """Returns a mark after all work enqueued before."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks, after waiting for `end`."""


class Stopwatch:
    """Milliseconds by name. Times of one name add up, and parts may be nested."""

    def __init__(self, clock: Clock, during: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        """Take the clock, and a context manager that is entered around each part with its name."""
        self._clock, self._during = clock, during
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        with self._during(name):
            start = self._clock.mark()
            try:
                yield
            finally:
                self._spans.append((name, start, self._clock.mark()))

    def ms(self) -> dict[str, float]:
        """Return milliseconds by name, after waiting for the measured work."""
        milliseconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            milliseconds[name] += self._clock.elapsed_ms(start, end)
        return dict(milliseconds)
