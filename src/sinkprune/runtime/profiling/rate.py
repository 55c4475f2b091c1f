"""Measures requests at a camera's steady rate, as on a robot. `profile` sends them as fast as it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sinkprune.contract.errors import UsageError
from sinkprune.contract.reports.energy import RateEnergy
from sinkprune.contract.reports.rate_report import BudgetRate, Latency, RateReport
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.power.conditions import logging_conditions
from sinkprune.runtime.power.curve import EnergyCurve
from sinkprune.runtime.power.meter import EnergyMeter
from sinkprune.runtime.power.sensor import ROOT
from sinkprune.runtime.profiling.frame_clock import FrameClock, ServedFrame
from sinkprune.runtime.profiling.profile import WARMUP, check_budgets, report_header
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.pictures import PictureLike


def at_rate(
    pipeline: Pipeline,
    pictures: Sequence[PictureLike | Sequence[PictureLike]],
    prompt: str | Sequence[str],
    budgets: Sequence[str],
    source: FrameClock,
    *,
    method: str = "sinkpruner",
    new_tokens: int = 16,
    warmup: int = 1,
    meter: EnergyMeter | None = None,
    root: Path = ROOT,
    on_frames: Callable[[str, int], None] = lambda budget, frames: None,
) -> RateReport:
    """Answer the frames of `source`, for one budget after the other, and return the measurements.

    Frame n shows `pictures[n]`, and the pictures repeat. Each has the images of one prompt. Every answer has exactly
    `new_tokens`. `warmup` requests of each budget come before its first frame and do not count. Temperatures and
    clocks are read below `root`. `on_frames` is called for each answered frame, with the number of frames since the
    last. Raises `UsageError`, and what `Pipeline.generate` raises.
    """
    warmup = WARMUP.check(warmup)
    if not pictures or not budgets:
        raise UsageError(
            f"there are {len(pictures)} pictures and {len(budgets)} budgets, expected at least one of each."
        )

    check_budgets(pipeline, next(iter(pictures)), prompt, budgets, method=method, new_tokens=new_tokens)
    first: dict[str, Answer] = {}

    def ask(budget: str, frame: int) -> Answer:
        shown = pictures[frame % len(pictures)]
        answer = pipeline.generate(
            shown, prompt, budget=budget, method=method, max_new_tokens=new_tokens, min_new_tokens=new_tokens
        )
        return first.setdefault(budget, answer)

    served: dict[str, list[ServedFrame]] = {name: [] for name in budgets}
    with logging_conditions(meter, root) as log:
        for name, frames in served.items():
            for turn in range(warmup):
                ask(name, turn)
            for done in source.serve(partial(ask, name)):
                on_frames(name, done.frame - (frames[-1].frame if frames else -1))
                frames.append(done)
    curve = meter.curve() if meter else None
    start = min(done.came for frames in served.values() for done in frames)
    answer = first[budgets[0]]
    return RateReport(
        **vars(report_header(pipeline, method, answer.prompt_tokens, new_tokens, meter)),
        rate_hz=source.rate,
        duration_s=source.duration,
        pictures=len(pictures),
        warmup=warmup,
        rates={
            name: _budget_rate(first[name], source, frames, start, meter, curve) for name, frames in served.items()
        },
        conditions=log.report(start),
    )


def _budget_rate(
    answer: Answer,
    source: FrameClock,
    served: Sequence[ServedFrame],
    start: float,
    meter: EnergyMeter | None,
    curve: EnergyCurve | None,
) -> BudgetRate:
    latencies = [1e3 * (done.ended - done.came) for done in served]
    began = served[0].came
    ended = max(served[-1].ended, began + source.duration)
    joules = curve.joules(began, ended) if curve else None
    return BudgetRate(
        visual_tokens=answer.visual_tokens,
        kept_after_sanitizer=answer.tokens_per_layer[0],
        tokens_per_layer=tuple(answer.tokens_per_layer),
        start_s=began - start,
        seconds=ended - began,
        frames=source.frames,
        answered=len(served),
        missed=source.frames - len(served),
        latency_ms=Latency.of(latencies),
        busy_ms=Latency.of([1e3 * (done.ended - done.began) for done in served]),
        answered_frames=tuple(done.frame for done in served),
        answer_latency_ms=tuple(latencies),
        energy=None if meter is None or joules is None else _energy(joules, ended - began, len(served), meter),
    )


def _energy(joules: float, seconds: float, answered: int, meter: EnergyMeter) -> RateEnergy:
    idle = meter.idle.watts * seconds
    return RateEnergy((joules - idle) / answered, joules / answered, joules / seconds)
