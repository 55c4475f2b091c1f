"""The report of `sinkprune-calibrate confidence`, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sinkprune.calibration.confidence.finder import AskedQuestions, cross_validated, fastest, least_right, outcome
from sinkprune.calibration.evaluation.intervals import Interval, relative_accuracy, wilson
from sinkprune.calibration.evaluation.report import TimedTaskReport, timed_head
from sinkprune.calibration.evaluation.sample_size import accuracy_warnings, mean_warnings
from sinkprune.contract.precision import Array
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.prefix_cache import ladders

SHARES = (1.0, 0.99, 0.98, 0.97, 0.95, 0.9)
"""The shares of the unpruned accuracy on the curve."""
FOLDS = 5


@dataclass(frozen=True)
class FixedBudget:
    """Answers from closed lists at one budget."""

    accuracy: float
    ci95: Interval
    """Wilson's 95 % interval of `accuracy`."""
    relative: float | None
    """The accuracy divided by the unpruned one; None if the unpruned model was never right."""
    mean_visual_tokens: float
    """Visual tokens a layer, mean over layers."""
    ttft_ms: float
    """Milliseconds to the first token, median over questions."""
    resumed_ms: float | None
    """The same for a step after another budget with the same sanitizer; None without such a budget."""


@dataclass(frozen=True)
class CurvePoint:
    """Budget `auto` with the thresholds for one share of the unpruned accuracy."""

    accuracy: float
    """Cross-validated: each question is answered with thresholds from other pictures, or from other questions if all
    are about one picture."""
    ci95: Interval
    relative: float | None
    share: float
    """The share of the unpruned accuracy that the thresholds were chosen for."""
    least: dict[str, float]
    """By budget, in the order of the steps: the least confidence of an answer that stands. 0 for the last."""
    reached: dict[str, float]
    """By budget: the share of questions that reach the step."""
    ttft_ms: float
    """Mean milliseconds to the first token, cross-validated, with the median time of each step."""
    same_questions_accuracy: float
    """The accuracy on the questions that the thresholds were chosen with, which is too good."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceReport(TimedTaskReport):
    """What `sinkprune-calibrate confidence --json` writes."""

    method: str
    folds: int
    """Parts of the pictures in the cross-validation, or of the questions if all are about one picture."""
    ladders: list[list[str]]
    """Groups of budgets that share a sanitizer and the first decoder layers."""
    budgets: dict[str, FixedBudget]
    """Each budget by itself, the smallest first and `none` last."""
    curve: tuple[CurvePoint, ...]
    """Budget `auto`, the largest share first."""
    chosen: CurvePoint
    """The point of the requested share."""


def new_report(
    pipeline: Pipeline,
    task: str,
    method: str,
    share: float,
    names: Sequence[str],
    means: Sequence[float],
    asked: AskedQuestions,
) -> ConfidenceReport:
    """Return the report about questions asked at the budgets `names`, with their `means` of visual tokens a layer."""
    unpruned = asked.right[:, -1]
    pictures = len(set(asked.pictures.tolist()))
    folds = min(FOLDS, pictures if pictures > 1 else len(unpruned))
    fixed = {
        name: FixedBudget(
            *_accuracy(asked.right[:, number], unpruned),
            mean_visual_tokens=means[number],
            ttft_ms=asked.times[number].ttft_ms,
            resumed_ms=asked.times[number].resumed_ms,
        )
        for number, name in enumerate(names)
    }
    shares = sorted({*SHARES, share}, reverse=True)
    found, held = fastest(asked, least_right(asked, shares)), cross_validated(asked, shares, folds)
    curve = []
    for target, steps, other in zip(shares, found, held, strict=True):
        own, budgets = outcome(asked, steps), [names[budget] for budget in steps.budgets]
        curve.append(
            CurvePoint(
                *_accuracy(other.right, unpruned),
                share=target,
                least=dict(zip(budgets, (*steps.least, 0.0), strict=True)),
                reached={budget: float((own.last >= step).mean()) for step, budget in enumerate(budgets)},
                ttft_ms=other.mean_ms,
                same_questions_accuracy=float(own.right.mean()),
            )
        )
    chosen = next(point for point in curve if point.share == share)
    manifest = pipeline.bundle.manifest
    return ConfidenceReport(
        **timed_head(manifest, pipeline.backend, task, asked.pictures.tolist()),
        method=method,
        folds=folds,
        ladders=ladders(manifest, method),
        budgets=fixed,
        curve=tuple(curve),
        chosen=chosen,
        warnings=(
            *accuracy_warnings(len(unpruned)),
            *mean_warnings(pictures),
            *_missed(chosen),
            *_never_asks_again(chosen),
        ),
    )


def _accuracy(right: Array, unpruned: Array) -> tuple[float, Interval, float | None]:
    return float(np.mean(right)), wilson(int(right.sum()), len(right)), relative_accuracy(right, unpruned)


def _missed(chosen: CurvePoint) -> tuple[str, ...]:
    if chosen.relative is None or chosen.relative >= chosen.share:
        return ()
    return (
        f"The thresholds were chosen for {100 * chosen.share:g} % of the unpruned accuracy. On questions that they "
        f"were not chosen with, {100 * chosen.relative:.1f} % was reached. Give a larger --share, or more questions.",
    )


def _never_asks_again(chosen: CurvePoint) -> tuple[str, ...]:
    if len(chosen.least) > 1:
        return ()
    return (
        f"Nothing is faster than budget {next(iter(chosen.least))} alone: auto takes it for every question, and asks "
        "none again.",
    )
