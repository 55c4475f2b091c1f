"""Frames at a camera's rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sinkprune.contract.checks import RealNumber
from sinkprune.contract.errors import UsageError
from sinkprune.contract.report import BudgetRate, Latency, RateEnergy, RateReport
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.power.meter import EnergyMeter, Span
from sinkprune.runtime.power.sensors import ROOT, ConditionsLog
from sinkprune.runtime.profiling.profile import WARMUP, check_budgets, report_header
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.pictures import PictureLike

RATE = RealNumber("rate", 0.01, 1000, "from 0.01 to 1000 frames a second")
DURATION = RealNumber("duration", 0.1, 86_400, "from 0.1 to 86400 seconds")


class ServedFrame(NamedTuple):
    """An answered frame. Moments are in seconds of `FrameClock.clock`."""

    frame: int
    """Its number, from 0."""
    came: float
    began: float
    ended: float


@dataclass(frozen=True)
class FrameClock:
    """A camera with a queue of one frame, the newest.

    A frame that arrives during an answer waits for the end of this answer. If another frame arrives before, the
    waiting frame is missed.
    """

    rate: float
    """Frames a second."""
    frames: int
    """The number of frames that arrive."""
    duration: float
    """Seconds of arriving frames. `serve` lasts at least as long."""
    clock: Callable[[], float] = time.monotonic
    """Seconds of a clock that never jumps."""
    sleep: Callable[[float], None] = time.sleep

    def serve(self, answer: Callable[[int], object]) -> Iterator[ServedFrame]:
        """Call `answer` with the number of each frame that is not missed, and yield a `ServedFrame` after each call.

        The first frame arrives at once. Ends after `duration`, or with the last answer if that is later.
        """
        start, taken = self.clock(), -1
        while taken < self.frames - 1:
            # Rounding may place a frame that has just arrived in the future.
            taken = max(taken + 1, min(int((self.clock() - start) * self.rate), self.frames - 1))
            came = start + taken / self.rate
            self._wait_until(came)
            began = self.clock()
            answer(taken)
            yield ServedFrame(taken, came, began, self.clock())
        self._wait_until(start + self.duration)

    def _wait_until(self, moment: float) -> None:
        while (left := moment - self.clock()) > 0:
            self.sleep(left)


def frame_clock(rate: float, duration: float) -> FrameClock:
    """Return a camera that sends frames for `duration` seconds, at least one. Raises `UsageError`."""
    rate, duration = RATE.check(rate), DURATION.check(duration)
    # Rounding must not lose a frame of a whole number.
    return FrameClock(rate, max(1, int(rate * duration + 1e-6)), duration)


class RateRun:
    """Answers to the frames of a camera at each of `budgets`. An interrupt of `measure` leaves the answers so far.

    Frame n shows `pictures[n]`, and the pictures repeat. Each has the images of one prompt. Every answer has exactly
    `new_tokens`. `meter` measures the joules. Temperatures and clocks are read below `root`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        pictures: Sequence[PictureLike | Sequence[PictureLike]],
        prompt: str | Sequence[str],
        budgets: Sequence[str],
        source: FrameClock,
        *,
        method: str = "sinkpruner",
        new_tokens: int = 16,
        meter: EnergyMeter | None = None,
        root: Path = ROOT,
    ) -> None:
        """Check the requests; raises `UsageError`, and what `Pipeline.generate` raises before it runs."""
        if not pictures or not budgets:
            raise UsageError(
                f"there are {len(pictures)} pictures and {len(budgets)} budgets, expected at least one of each."
            )
        check_budgets(pipeline, next(iter(pictures)), prompt, budgets, method=method, new_tokens=new_tokens)
        self._pipeline, self._pictures, self._prompt, self._source = pipeline, pictures, prompt, source
        self._method, self._new_tokens, self._warmup = method, new_tokens, 0
        self._meter, self._conditions = meter, ConditionsLog(root)
        self._first: dict[str, Answer] = {}
        self._seen_share = 1.0
        self._served: dict[str, list[ServedFrame]] = {name: [] for name in budgets}

    @property
    def count(self) -> int:
        """The number of answers, without warm-up."""
        return sum(map(len, self._served.values()))

    def measure(
        self, warmup: int = 1, on_frames: Callable[[str, int], None] = lambda budget, frames: None
    ) -> RateReport:
        """Answer the frames, for one budget after the other, and return the report.

        `warmup` requests of each budget come before its first frame and do not count. `on_frames` is called for each
        answered frame, with the number of frames since the last. Raises `UsageError`, and what `Pipeline.generate`
        raises.
        """
        self._warmup = WARMUP.check(warmup)
        with self._conditions:
            for name, frames in self._served.items():
                for turn in range(self._warmup):
                    self._ask(name, turn)
                for done in self._source.serve(partial(self._ask, name)):
                    on_frames(name, done.frame - (frames[-1].frame if frames else -1))
                    frames.append(done)
        return self.report()

    def report(self) -> RateReport:
        """Return the report on the answers so far, of which there must be one."""
        served = {name: frames for name, frames in self._served.items() if frames}
        start, meter, source = min(frames[0].came for frames in served.values()), self._meter, self._source
        answer = self._first[next(iter(served))]
        return RateReport(
            **vars(report_header(self._pipeline, self._method, answer.prompt_tokens, self._new_tokens, meter)),
            rate_hz=source.rate,
            duration_s=source.duration,
            pictures=len(self._pictures),
            warmup=self._warmup,
            seen_share=self._seen_share,
            rates={name: self._budget_rate(name, start) for name in served},
            conditions=self._conditions.report(start),
        )

    def _ask(self, budget: str, frame: int) -> Answer:
        answer = self._pipeline.generate(
            self._pictures[frame % len(self._pictures)],
            self._prompt,
            budget=budget,
            method=self._method,
            max_new_tokens=self._new_tokens,
            min_new_tokens=self._new_tokens,
        )
        self._seen_share = min([self._seen_share, *(kept.layout.seen_share for kept in answer.images)])
        return self._first.setdefault(budget, answer)

    def _budget_rate(self, name: str, start: float) -> BudgetRate:
        answer, served, source = self._first[name], self._served[name], self._source
        latencies = [1e3 * (done.ended - done.came) for done in served]
        began, last = served[0].came, served[-1]
        # An interrupt leaves frames that never came.
        whole = last.frame == source.frames - 1
        came = source.frames if whole else last.frame + 1
        ended = max(last.ended, began + source.duration) if whole else last.ended
        return BudgetRate(
            visual_tokens=answer.visual_tokens,
            kept_after_sanitizer=answer.tokens_per_layer[0],
            tokens_per_layer=tuple(answer.tokens_per_layer),
            start_s=began - start,
            seconds=ended - began,
            frames=came,
            answered=len(served),
            missed=came - len(served),
            latency_ms=Latency.of(latencies),
            busy_ms=Latency.of([1e3 * (done.ended - done.began) for done in served]),
            answered_frames=tuple(done.frame for done in served),
            answer_latency_ms=tuple(latencies),
            energy=self._energy(Span(began, ended), len(served)),
        )

    def _energy(self, span: Span, answered: int) -> RateEnergy | None:
        if self._meter is None:
            return None
        (joules,), seconds = self._meter.joules([span]), span.end - span.start
        if joules is None:
            return None
        idle = self._meter.idle_watts * seconds
        return RateEnergy((joules - idle) / answered, joules / answered, joules / seconds)
