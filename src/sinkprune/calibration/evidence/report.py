"""The report of `sinkprune-calibrate evidence`, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.calibration.evaluation.report import TaskReport
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


@dataclass(frozen=True, kw_only=True)
class EvidenceReport(TaskReport):
    """What `sinkprune-calibrate evidence --json` writes."""

    method: str
    budgets: dict[str, FoundThresholds]
    """By the budget's name."""
