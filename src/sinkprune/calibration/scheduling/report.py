"""What a search for a schedule reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sinkprune.contract.budgets import Budget
from sinkprune.contract.report import FEWEST_OF_P95, Spread
from sinkprune.deadlines.costs import Costs

NEAR: Final = 0.08
"""The largest error of an accurate prediction, as a share of the measured time."""


@dataclass(frozen=True)
class Candidate:
    """A budget that is predicted to meet the target."""

    budget: Budget
    stages_after: tuple[int, ...]
    """The 0-based layers that its stages follow."""
    rows: tuple[int, ...]
    """Visual rows into the LLM and after each stage, for the measured picture."""
    mean_visual_tokens: float
    """Visual tokens a layer, mean over layers."""
    lost: float
    """The share of text-visual attention that it drops, mean over layers."""
    accuracy: float | None
    """The share of right answers to the questions of --data; None without --data."""
    predicted_ms: float
    """Predicted milliseconds to the last of the new tokens."""


@dataclass(frozen=True)
class ScheduleReport:
    """The chosen budget, the alternatives, and their times."""

    name: str
    """The budget's, in the bundle."""
    pictures: int
    """Pictures whose attention was measured."""
    visual_tokens: int
    prompt_tokens: int
    new_tokens: int
    costs: Costs
    unpruned_ms: float
    """Predicted."""
    questions: int
    """Questions of --data that were answered; 0 without --data."""
    unpruned_accuracy: float | None
    chosen: Candidate
    others: tuple[Candidate, ...]
    """The other budgets that were compared by their answers."""
    measured_ms: Spread
    """Of the chosen budget, to the last of the new tokens."""
    unpruned_measured_ms: Spread
    """Of the unpruned model, measured in turn with the chosen budget.

    Its ratio to `unpruned_ms` is the change of the machine's speed since the costs were measured.
    """
    requests: int
    """Of each of these two times: the measured requests. Of fewer than 20, the 95th percentile is the slowest."""
    searches: int = 1
    """How many times a budget was searched and measured."""
    warnings: tuple[str, ...] = ()
    """Why the figures say little, and what is doubtful about the budget."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""

    @property
    def off(self) -> float:
        return self.chosen.predicted_ms / self.measured_ms.median - 1

    @property
    def accurate(self) -> bool:
        return abs(self.off) <= NEAR


_MOST_LOST = 0.85
"""The share of attention above which a budget causes a warning."""


def report_text(report: ScheduleReport) -> str:
    what = "first token" if report.new_tokens == 1 else f"{report.new_tokens} new tokens"
    lines = [
        f"{report.visual_tokens} visual tokens and {report.prompt_tokens} of text, to the {what}",
        f"none: predicted {_ms(report.unpruned_ms)}, measured {_spread(report.unpruned_measured_ms)}"
        f"{_rated(report.unpruned_accuracy, report.questions)}",
        f"{report.name}: predicted {_ms(report.chosen.predicted_ms)}, measured {_spread(report.measured_ms)}; "
        f"the prediction is {100 * abs(report.off):.1f} % too {'low' if report.off < 0 else 'high'}",
        _described(report.chosen, report.questions),
    ]
    if few := few_requests(report.requests):
        lines.append(few)
    if report.searches > 1:
        lines.append(
            f"searched {report.searches} times, because earlier budgets missed the target or left much of the time"
        )
    lines += [
        f"also looked at: {_described(other, report.questions)}, predicted {_ms(other.predicted_ms)}"
        for other in report.others
    ]
    return "".join(f"{line}\n" for line in lines)


def few_requests(requests: int) -> str:
    """Return a sentence, without its full stop, about percentiles of so many requests; "" if they are enough."""
    if requests >= FEWEST_OF_P95:
        return ""
    return (
        f"{requests} requests of each: of fewer than {FEWEST_OF_P95}, p95 is close to the slowest. A larger "
        "--seconds measures more"
    )


def _described(candidate: Candidate, questions: int) -> str:
    first, *left = candidate.rows
    stages = f", {', '.join(map(str, left))} after {_layers(candidate.stages_after)}" if left else ""
    return (
        f"{first} tokens into the LLM{stages}; mean {candidate.mean_visual_tokens:.1f} a layer; drops "
        f"{100 * candidate.lost:.1f} % of the text's attention{_rated(candidate.accuracy, questions)}"
    )


def _rated(accuracy: float | None, questions: int) -> str:
    return "" if accuracy is None else f", {accuracy * questions:.0f} of {questions} answers right"


def _spread(spread: Spread) -> str:
    return f"{_ms(spread.median)} (p95 {_ms(spread.p95)})"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _layers(layers: Sequence[int]) -> str:
    listed = ", ".join(map(str, layers))
    return f"layer{'s' if len(layers) > 1 else ''} {listed}" if listed else "no layer"


def doubts(report: ScheduleReport) -> Iterator[str]:
    """Yield a warning for a budget that drops much, and for one whose measured time is far from the predicted."""
    if report.chosen.lost > _MOST_LOST:
        yield (
            f"the budget drops {100 * report.chosen.lost:.1f} % of the text's attention to the picture, so many "
            "answers may be wrong. Compare it with others: sinkprune-evaluate."
        )
    if not report.accurate:
        yield (
            f"the prediction misses the measurement by {100 * abs(report.off):.1f} %, more than {100 * NEAR:.0f} %: "
            "the machine's speed changed meanwhile. Measure again when the machine does nothing else."
        )
