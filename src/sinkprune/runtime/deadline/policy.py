"""Answers that must be there in time: the budget is chosen for it, and tokens come for as long as there is time.

Times are of a clock that never jumps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from sinkprune.contract.costs.model import Costs, predict
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.deadline.choices import Choice, up_to
from sinkprune.runtime.deadline.request_history import RequestHistory
from sinkprune.runtime.steps.answer import DeadlineReport
from sinkprune.runtime.steps.request import Request

Now = Callable[[], float]
"""Seconds of a clock that never jumps."""


class BudgetPolicy:
    """Of a request without a deadline: it runs as it was asked for."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def budgets(self, manifest: Manifest, layouts: Sequence[VisualLayout]) -> list[str]:
        """The budgets that the request may run at; raises `BudgetError` for one that the bundle does not hold."""
        return [self._request.budget]

    def choose(self, choices: Sequence[Choice], text: int, layouts: Sequence[VisualLayout]) -> Choice:
        """What it runs at, of at least one choice, the largest first; called when the tower is done."""
        return choices[0]

    def first_token(self) -> None:
        """Called when the first token is there."""

    def goes_on(self, tokens: int) -> bool:
        """Whether there may be a token behind so many."""
        return tokens < self._request.max_new_tokens

    def finish(self, tokens: int) -> str:
        """Why there are no more than so many tokens, where the model did not end the answer."""
        return "length"

    def ended(self, steps: Sequence[float]) -> DeadlineReport | None:
        """Called with the milliseconds of each token behind the first, when the answer is there."""
        return None


class DeadlinePolicy(BudgetPolicy):
    """Of a request that must be answered in time.

    It runs at the largest budget whose tokens, as many as were asked for, are expected in time: by the machine's
    costs, times what the slowest of the last requests took of theirs. If none brings all of them, it runs at the one
    that brings the first soonest. Tokens end when there is no time for another.
    """

    def __init__(
        self,
        request: Request,
        deadline_ms: float,
        manifest: Manifest,
        costs: Costs,
        history: RequestHistory,
        now: Now = time.perf_counter,
        began: float | None = None,
    ) -> None:
        """The deadline is counted from `began`, a time of the clock `now` (default: from now on). What the request
        takes is added to `history`."""
        super().__init__(request)
        self._deadline_ms, self._manifest, self._costs, self._history = deadline_ms, manifest, costs, history
        self._now, self._began = now, now() if began is None else began

    def budgets(self, manifest: Manifest, layouts: Sequence[VisualLayout]) -> list[str]:
        return up_to(manifest, self._request.method, self._request.budget, layouts)

    def choose(self, choices: Sequence[Choice], text: int, layouts: Sequence[VisualLayout]) -> Choice:
        self._tower_at, self._slower = self._elapsed(), self._history.slower
        left, wanted = self._deadline_ms - self._tower_at, self._request.max_new_tokens
        usual = [predict(self._costs, self._manifest, choice.schedule, text, layouts) for choice in choices]
        expected = [self._slower.of(prediction) for prediction in usual]
        whole = [number for number, each in enumerate(expected) if each.first + (wanted - 1) * each.token <= left]
        chosen = whole[0] if whole else min(range(len(choices)), key=lambda number: expected[number].first)
        self._budget, self._usual, self._expected = choices[chosen].budget, usual[chosen], expected[chosen]
        self._can_meet = self._expected.first <= left
        self._tokens = self._fitting(left - self._expected.first)
        if whole:
            self._reason = f"the largest budget that is expected to bring {told(wanted)} in time"
        elif self._can_meet:
            self._reason = f"no budget is expected to bring {told(wanted)} in time; this one brings most"
        else:
            self._reason = "no budget is expected to bring a token in time; this one brings the first soonest"
        return choices[chosen]

    def first_token(self) -> None:
        self._first_at = self._elapsed()

    def goes_on(self, tokens: int) -> bool:
        in_time = self._elapsed() + self._expected.token <= self._deadline_ms
        return tokens < self._request.max_new_tokens and in_time

    def finish(self, tokens: int) -> str:
        return "length" if tokens >= self._request.max_new_tokens else "deadline"

    def ended(self, steps: Sequence[float]) -> DeadlineReport:
        measured = self._elapsed()
        token = sum(steps) / len(steps) if steps else None
        self._history.add(self._usual, self._first_at - self._tower_at, token)
        return DeadlineReport(
            deadline_ms=self._deadline_ms,
            budget=self._budget,
            reason=self._reason,
            can_meet=self._can_meet,
            met=measured <= self._deadline_ms,
            expected_tokens=self._tokens,
            predicted_first_ms=self._tower_at + self._expected.first,
            first_ms=self._first_at,
            predicted_ms=self._tower_at + self._expected.first + (self._tokens - 1) * self._expected.token,
            measured_ms=measured,
            slower=self._slower.first,
            costs_age_s=None if self._costs.measured_at is None else max(0.0, time.time() - self._costs.measured_at),
            costs_load=self._costs.load,
        )

    def _fitting(self, left: float) -> int:
        """How many tokens there may be where the first is there and `left` milliseconds are."""
        more = math.floor(min(left / self._expected.token, self._request.max_new_tokens)) if left > 0 else 0
        return min(1 + more, self._request.max_new_tokens)

    def _elapsed(self) -> float:
        """Milliseconds since the request began."""
        return (self._now() - self._began) * 1e3


def told(tokens: int) -> str:
    """So many tokens, in words."""
    return "one token" if tokens == 1 else f"all {tokens} tokens"
