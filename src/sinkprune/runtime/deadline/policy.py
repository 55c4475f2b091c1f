"""Chooses the largest budget whose answer is expected before a deadline, and ends the answer in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.costs.model import Costs, Prediction, predict
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.plans import Plan
from sinkprune.contract.schedule import Schedule, schedules_up_to
from sinkprune.runtime.deadline.request_history import RequestHistory, Slowdown
from sinkprune.runtime.hooks import Budgets
from sinkprune.runtime.steps.answer import DeadlineReport
from sinkprune.runtime.steps.request import Request

Now = Callable[[], float]
"""Seconds of a clock that never jumps."""

_ENOUGH_TOKENS = 8
"""The first few tokens say little about later ones. So an answer with fewer tokens after its first counts as one with
this many. The tokens that it lacks get the first token's ratio of measured to predicted time, so that short answers
correct costs that are too high."""
_ADVICE = "set max_new_tokens (--max-new-tokens, the server's max_tokens) to the tokens that you need"


class _Option(NamedTuple):
    """A budget that a request may run at, and its times."""

    planned: Schedule
    usual: Prediction
    """The times that the machine's costs predict."""
    expected: Prediction
    """The same, at the machine's recent speed."""


@dataclass(frozen=True)
class _Decision:
    """What a policy chose, and what it expected."""

    option: _Option
    tower_ms: float
    """When the vision tower was done and the budget was chosen."""
    slower: Slowdown
    tokens: int
    """How many tokens are expected in time."""
    can_meet: bool
    """Whether the first token is expected in time."""
    reason: str


class DeadlinePolicy(Budgets):
    """The policy of a request with a deadline.

    It chooses the largest budget, up to the request's, at which all tokens, or all passes of a closed list, are
    expected in time: by the times that the machine's costs predict, multiplied by the slowdown of recent requests. If
    no budget meets that, it chooses the one with the earliest first token. The answer ends when there is no time for
    another token.
    """

    _decision: _Decision
    _first_ms: float

    def __init__(
        self,
        manifest: Manifest,
        request: Request,
        plan: Plan | None,
        passes: Sequence[Sequence[int]] | None,
        deadline_ms: float,
        costs: Costs,
        history: RequestHistory,
        now: Now = time.perf_counter,
        began: float | None = None,
        first_uses: Callable[[], int] = int,
    ) -> None:
        """Count the deadline from `began`, a time of the clock `now` (default: from this call on).

        `passes` are those of the request's closed list (`ChoiceTokens.passes`). `first_uses` is `Chain.first_uses`.
        The request's own times are added to `history`, unless it reused rows, loaded a graph or was the first.
        """
        super().__init__(manifest, request, plan, None if passes is None else len(passes))
        self._passes, self._first_uses = passes, first_uses
        self._deadline_ms, self._costs, self._history = deadline_ms, costs, history
        self._now, self._began = now, now() if began is None else began

    def candidates(self, layouts: Sequence[VisualLayout]) -> list[Schedule]:
        return schedules_up_to(self._manifest, self._request.method, self._request.budget, layouts)

    def choose(self, possible: Sequence[Schedule], text: int) -> Schedule:
        tower_ms, slower, self._uses = self._elapsed(), self._history.slower, self._first_uses()
        left = self._deadline_ms - tower_ms
        usual = [predict(self._costs, self._manifest, planned, text) for planned in possible]
        if self._passes:
            rows = [*map(len, self._passes)]
            usual = [each.of_passes(rows, self._costs.pass_row) for each in usual]
        options = [_Option(planned, own, slower.of(own)) for planned, own in zip(possible, usual, strict=True)]
        whole = next((one for one in options if one.expected.whole(self._most) <= left), None)
        chosen = whole or min(options, key=lambda one: one.expected.first)
        reason = self._reason(options, chosen, left, whole=whole is not None)
        self._decision = _Decision(
            option=chosen,
            tower_ms=tower_ms,
            slower=slower,
            tokens=self._tokens_within(left, chosen.expected),
            can_meet=chosen.expected.first <= left,
            reason=reason + self._costs.far_above(text + possible[0].rows),
        )
        return chosen.planned

    def _reason(self, options: Sequence[_Option], chosen: _Option, left: float, *, whole: bool) -> str:
        """Return why an option was `chosen`, with advice; `whole` is whether all tokens are expected in time."""
        cap, can_meet = up_to(self._request.budget), chosen.expected.first <= left
        earliest = "in time, so the budget with the earliest first token runs"
        bring = f"bring {_counted(self._most)}" if self._passes is None else "compare the whole list"
        if whole:
            reason = f"the largest budget{cap} that is expected to {bring} in time"
        elif can_meet:
            reason = f"no budget{cap} is expected to {bring} {earliest}"
        else:
            reason = f"no budget{cap} is expected to bring a token {earliest}"
        if self._passes is not None:
            # The length of a closed list's answers is no choice of the user.
            return reason
        larger = takewhile(lambda one: one is not chosen, options)
        first = next((one for one in larger if one.expected.first <= left), None)
        if first is not None:
            fitting = self._tokens_within(left, first.expected)
            return f"{reason}; budget {first.planned.budget} would bring {fitting}: {_ADVICE}"
        return f"{reason}; {_ADVICE}" if can_meet and not whole else reason

    def first_token(self) -> None:
        self._first_ms = self._elapsed()

    def finish(self, tokens: int) -> str:
        expected = self._decision.option.expected
        in_time = self._elapsed() + expected.later(tokens) - expected.later(tokens - 1) <= self._deadline_ms
        return super().finish(tokens) or ("" if in_time else "deadline")

    def ended(self, token_ms: Sequence[float], *, reused: bool) -> DeadlineReport:
        measured, chosen, costs = self._elapsed(), self._decision, self._costs
        usual, expected = chosen.option.usual, chosen.option.expected
        if not reused and self._first_uses() == self._uses:
            first, count = self._first_ms - chosen.tower_ms, max(len(token_ms), _ENOUGH_TOKENS)
            missing = usual.later(count) - usual.later(len(token_ms))
            self._history.add(usual, first, sum(token_ms) + missing * first / usual.first, count)
        predicted_first = chosen.tower_ms + expected.first
        return DeadlineReport(
            deadline_ms=self._deadline_ms,
            budget=chosen.option.planned.budget,
            reason=chosen.reason,
            can_meet=chosen.can_meet,
            met=measured <= self._deadline_ms,
            expected_tokens=chosen.tokens,
            predicted_first_ms=predicted_first,
            first_ms=self._first_ms,
            predicted_ms=predicted_first + expected.later(chosen.tokens - 1),
            measured_ms=measured,
            slower=chosen.slower.first,
            costs_age_s=costs.age_s,
            costs_load=costs.load,
        )

    def _tokens_within(self, left: float, expected: Prediction) -> int:
        """Return how many tokens fit into `left` milliseconds after the tower; one is always written."""
        return 1 + expected.within(left - expected.first, self._most - 1)

    def _elapsed(self) -> float:
        """Milliseconds since the request began."""
        return (self._now() - self._began) * 1e3


def up_to(budget: str) -> str:
    """Return words about the largest budget that a deadline may choose, or "" where all may be chosen."""
    return "" if budget == UNPRUNED else f" up to {budget}"


def _counted(tokens: int) -> str:
    return {1: "one token", 2: "both tokens"}.get(tokens, f"all {tokens} tokens")
