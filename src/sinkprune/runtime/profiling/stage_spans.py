"""When the parts of a request ran, by the host's clock: what joules are counted by."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sinkprune.runtime.device.stopwatch import Clock
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.observer import NOBODY, Observer


class Span(NamedTuple):
    """A stretch of time, by `time.monotonic`."""

    start: float
    end: float


class StageSpans(Observer):
    """The spans of one request's parts. It waits for the device before and behind each: a GPU is told what to do long
    before it does it, and joules are used when it does."""

    def __init__(self, clock: Clock, also: Observer = NOBODY) -> None:
        """`clock` is the backend; `also` is another observer of the same request, of which `during` is told."""
        self._clock, self._also = clock, also
        self.parts: dict[str, list[Span]] = defaultdict(list)
        """By the part's name (`PARTS` in `sinkprune.contract.reports.report`); a part may have run more than once."""
        self.end: float | None = None
        """When the whole answer was there."""
        self.tokens = 0
        """How many the answer has."""

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        with self._also.during(part):
            start = self._now()
            try:
                yield
            finally:
                self.parts[part].append(Span(start, self._now()))

    def answered(self, answer: Answer) -> None:
        self.end, self.tokens = self._now(), len(answer.token_ids)

    def _now(self) -> float:
        mark = self._clock.mark()
        self._clock.elapsed_ms(mark, mark)
        return time.monotonic()
