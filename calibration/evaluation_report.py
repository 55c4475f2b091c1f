"""The evaluation report: what `sinkprune-evaluate --json` writes, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sinkprune.calibration.intervals import Interval, paired_bootstrap, relative_accuracy, wilson
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.report import Spread


class Combination(NamedTuple):
    """A method at a budget."""

    method: str
    budget: str


BASELINE = Combination(UNPRUNED, UNPRUNED)
"""The unpruned engines, which every evaluation runs."""


@dataclass(frozen=True)
class Reply:
    """What one combination replied to one question."""

    id: str
    kind: str
    combination: Combination
    text: str
    right: bool
    mean_visual_tokens: float
    """Over all decoder layers (input counting)."""
    ttft_ms: float


@dataclass(frozen=True)
class KindReport:
    """The questions of one kind."""

    accuracy: float
    ci95: Interval
    count: int


@dataclass(frozen=True)
class CombinationReport:
    """One combination, evaluated. Accuracies are fractions."""

    accuracy: float
    ci95: Interval
    """Wilson's interval."""
    relative: float | None
    """Accuracy over that of the unpruned engines; None where those had no right answer."""
    relative_ci95: Interval | None
    """By paired bootstrap over the questions."""
    by_kind: dict[str, KindReport]
    mean_visual_tokens: float
    """Visual tokens a decoder layer ran on, over all layers and questions (input counting)."""
    ttft_ms: Spread


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation: every combination against the unpruned engines on the same questions."""

    model: str
    backend: str
    precision: str
    machine: str
    threads: int
    task: str
    questions: int
    blind: bool
    """Whether every picture was replaced by a grey one."""
    planted_outliers: bool
    """Whether background tokens were turned into outliers (`sinkprune.calibration.outliers`)."""
    max_new_tokens: int
    versions: dict[str, str]
    none: CombinationReport
    methods: dict[str, dict[str, CombinationReport]]
    """By method, then budget."""
    unreachable: tuple[Combination, ...]
    """Combinations asked for that the bundle does not hold: methods that cannot reach a budget's mean."""


def summarise(replies: Sequence[Reply], base: Sequence[Reply]) -> CombinationReport:
    """One combination's replies against the baseline's to the same questions, in the same order."""
    right = np.array([reply.right for reply in replies])
    base_right = np.array([reply.right for reply in base])
    kinds = dict.fromkeys(reply.kind for reply in replies)
    return CombinationReport(
        accuracy=float(right.mean()),
        ci95=wilson(int(right.sum()), len(right)),
        relative=relative_accuracy(right, base_right),
        relative_ci95=paired_bootstrap(right, base_right),
        by_kind={kind: _summarise_kind([reply for reply in replies if reply.kind == kind]) for kind in kinds},
        mean_visual_tokens=sum(reply.mean_visual_tokens for reply in replies) / len(replies),
        ttft_ms=Spread.of([reply.ttft_ms for reply in replies]),
    )


def _summarise_kind(replies: Sequence[Reply]) -> KindReport:
    right = sum(reply.right for reply in replies)
    return KindReport(right / len(replies), wilson(right, len(replies)), len(replies))
