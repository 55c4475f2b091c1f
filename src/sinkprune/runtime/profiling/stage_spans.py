"""The times of a request's parts by the host's clock, for their joules."""

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
    """The spans of one request's parts.

    Waits for the device before and after each part, because a GPU works, and uses joules, after work was enqueued.
    """

    def __init__(self, clock: Clock, also: Observer = NOBODY) -> None:
        """Take the backend as `clock`, and another observer whose `during` is entered for each part."""
        self._clock, self._also = clock, also
        self.parts: dict[str, list[Span]] = defaultdict(list)
        """By the part's name (`PARTS` in `sinkprune.contract.reports.report`). A part may have several spans."""
        self.end: float | None = None
        """The moment of the whole answer."""
        self.tokens = 0
        """The number of tokens of the answer."""

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
