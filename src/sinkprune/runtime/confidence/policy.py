"""The budget policy of requests at budget `auto`: small budgets first, larger ones where the answer is unsure."""

from __future__ import annotations

from collections.abc import Sequence

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.confidence.thresholds import Thresholds
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.steps.request import Request


class ConfidencePolicy(BudgetPolicy):
    """Starts at the first budget of the thresholds, and goes on until an answer reaches its budget's threshold."""

    def __init__(
        self, manifest: Manifest, request: Request, passes: Sequence[Sequence[int]] | None, thresholds: Thresholds
    ) -> None:
        super().__init__(manifest, request, passes)
        self._least = thresholds.least
        self._larger: list[Schedule] = []

    def candidates(self, layouts: Sequence[VisualLayout]) -> list[Schedule]:
        return [schedule(self._manifest, self._request.method, budget, layouts) for budget in self._least]

    def choose(self, possible: Sequence[Schedule], text: int) -> Schedule:
        first, *self._larger = possible
        return first

    def following(self, chosen: Schedule, confidence: float) -> Schedule | None:
        if confidence >= self._least[chosen.budget] or not self._larger:
            return None
        return self._larger.pop(0)
