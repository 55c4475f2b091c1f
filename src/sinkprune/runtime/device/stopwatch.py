"""Times of a request's parts by the device's own clock, so that measuring never makes the host wait."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


class Clock(Protocol):
    """The clock of a stopwatch. Every `Backend` is one. The default is for libraries whose calls return when they are
    done: the time of the host."""

    mark: Callable[[], Any] = time.perf_counter
    """Returns the moment at which all work enqueued so far is done."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two results of `mark`; waits for the second."""
        return float(end - start) * 1e3


class Stopwatch:
    """Milliseconds by name. Times of one name add up, and parts may be nested."""

    def __init__(self, clock: Clock, during: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> None:
        """Take the clock, and a context manager that is entered around each part with its name."""
        self._clock, self._during = clock, during
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def measure(self, *names: str) -> Iterator[None]:
        """Add the time of the block to each of `names`, of which each is a part of the one before it."""
        with ExitStack() as parts:
            for name in names:
                parts.enter_context(self._during(name))
            start = self._clock.mark()
            try:
                yield
            finally:
                end = self._clock.mark()
                self._spans += [(name, start, end) for name in names]

    def timed(self, name: str, call: Callable[[Given], Result], given: Given) -> Result:
        """Return `call(given)`, whose time is added to `name`."""
        with self.measure(name):
            return call(given)

    def ms(self) -> dict[str, float]:
        """Return milliseconds by name, after waiting for the measured work."""
        milliseconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            milliseconds[name] += self._clock.elapsed_ms(start, end)
        return dict(milliseconds)
