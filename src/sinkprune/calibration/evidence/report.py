"""The report of `sinkprune-calibrate evidence`, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.contract.reports.report import TokenSpread


@dataclass(frozen=True)
class FoundThresholds:
    """What a method keeps at a budget with the thresholds that were found."""

    thresholds: tuple[float, ...]
    """The threshold of each test, in units of the register's evidence."""
    aimed_visual_tokens: float
    """The budget's mean of visual tokens a layer, over these requests."""
    mean_visual_tokens: float
    """The mean of visual tokens a layer that is kept."""
    visual_tokens: TokenSpread
    """The same of single requests."""


@dataclass(frozen=True)
class EvidenceReport:
    """What `sinkprune-calibrate evidence --json` writes."""

    model: str
    """The checkpoint's name."""
    backend: str
    compute: str
    task: str
    """The name of the file of questions."""
    method: str
    questions: int
    pictures: int
    budgets: dict[str, FoundThresholds]
    """By the budget's name."""
    warnings: tuple[str, ...]
    """Why the figures say little."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""
