"""Requests with a deadline: the largest budget whose predicted time meets it, by costs and by recent requests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from sinkprune.contract.budgets import UNPRUNED, Plan
from sinkprune.contract.errors import BudgetError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import Schedule, VisualLayout, schedule
from sinkprune.deadlines.costs import LEAST_MS, Costs, Prediction, RecentRatios, predict
from sinkprune.runtime.hooks import Budgets
from sinkprune.runtime.steps.answer import DeadlineReport
from sinkprune.runtime.steps.request import Request

Now = Callable[[], float]
"""Seconds of a clock that never jumps."""
WINDOW = 40
"""How many requests the history holds. If their order is random, the next request is slower than all of them with
probability 1 / (`WINDOW` + 1), whatever their distribution: 2.4 %."""
MARGIN = 1.05
"""The expected time is the slowest recent request's times this."""
_FEW = 20
"""With fewer requests, the next one is slower than all of them with a probability of more than 5 %."""
_UNKNOWN = 1.3
"""With fewer than `_FEW` requests, the expected slowdown is at least the fastest request's times this."""
_ENOUGH_TOKENS = 8
"""The first few tokens say little about later ones. So an answer with fewer tokens after its first counts as one with
this many. The tokens that it lacks get the first token's ratio of measured to predicted time, so that short answers
correct costs that are too high."""
_ADVICE = "set max_new_tokens (--max-new-tokens, the server's max_tokens) to the tokens that you need"


class Slowdown(NamedTuple):
    """The expected time of a request as a multiple of its predicted costs."""

    first: float
    """From the end of the vision tower to the first token."""
    token: float
    """For the tokens after the first."""

    def of(self, usual: Prediction) -> Prediction:
        """Return the expected times, where `usual` are the predicted costs."""
        return usual._replace(first=usual.first * self.first, token=usual.token * self.token)


class RequestHistory:
    """The last `WINDOW` requests. A slow request counts at once, and leaves the history after `WINDOW` others.

    Requests that are faster than their costs lower the expected times in the same way.
    """

    def __init__(self, recent: RecentRatios | None = None) -> None:
        """Start with `recent` requests, which an earlier process may have answered."""
        recent = recent or RecentRatios()
        self._first, self._token = deque(recent.first, WINDOW), deque(recent.token, WINDOW)

    def add(self, usual: Prediction, first: float, later: float, tokens: int) -> None:
        """Add a request with the predicted costs `usual`.

        It took `first` milliseconds from the tower to its first token, and `later` for all `tokens` after it, one or
        more.
        """
        self._first.append(first / usual.first)
        self._token.append(later / max(usual.later(tokens), LEAST_MS))

    @property
    def slower(self) -> Slowdown:
        """The expected slowdown of the next request: that of the slowest recent one."""
        return Slowdown(_expected(self._first), _expected(self._token))

    @property
    def recent(self) -> RecentRatios:
        """The requests, for a later process."""
        return RecentRatios(tuple(self._first), tuple(self._token))


def _expected(ratios: Collection[float]) -> float:
    unknown = [_UNKNOWN * min(ratios, default=1.0)] if len(ratios) < _FEW else []
    return MARGIN * max([*ratios, *unknown])


class _Option(NamedTuple):
    """A budget that a request may run at, and its times."""

    planned: Schedule
    usual: Prediction
    """The times that the machine's costs predict."""
    expected: Prediction
    """The same, at the machine's recent speed."""


def schedules_up_to(manifest: Manifest, method: str, budget: str, layouts: Sequence[VisualLayout]) -> list[Schedule]:
    """Return the schedules of `budget` and of all budgets of `method` that keep no more of such pictures.

    The largest is first. They are chosen after the tower, so budgets with a tower of their own are left out. Raises
    `BudgetError` for one of those, and for an unknown method or budget.
    """
    layers, own = manifest.language_model.num_layers, schedule(manifest, method, budget, layouts)
    if own.plan is not None and own.plan.tower is not None:
        raise BudgetError(
            f"deadlines choose a budget after the vision tower, and '{budget}' has a tower of its own (option "
            f"'{own.plan.tower.removeprefix('vision+')}'). Give a budget without that option, or no deadline."
        )

    def rows(planned: Schedule) -> int:
        """Return the visual rows of all layers together."""
        return sum(planned.per_layer(layers))

    names = [UNPRUNED, *(name for name, plan in manifest.plans[method].items() if plan.tower is None)]
    every = [schedule(manifest, method, name, layouts) for name in names]
    return sorted((one for one in every if rows(one) <= rows(own)), key=lambda one: -rows(one))


class DeadlinePolicy(Budgets):
    """The policy of a request with a deadline.

    It chooses the largest budget, up to the request's, at which all tokens, or all passes of a closed list, are
    expected in time: by the times that the machine's costs predict, multiplied by the slowdown of recent requests. If
    no budget meets that, it chooses the one with the earliest first token. The answer ends when there is no time for
    another token.
    """

    timed = True
    _chosen: _Option
    _report: partial[DeadlineReport]
    """Lacks the measured times."""
    _tower_ms: float
    """When the vision tower was done and the budget was chosen."""
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
        super().__init__(manifest, request, plan, passes)
        self._first_uses = first_uses
        self._deadline_ms, self._costs, self._history = deadline_ms, costs, history
        self._now, self._began = now, now() if began is None else began

    def candidates(self, layouts: Sequence[VisualLayout]) -> list[Schedule]:
        return schedules_up_to(self._manifest, self._request.method, self._request.budget, layouts)

    def choose(self, possible: Sequence[Schedule], text: int) -> Schedule:
        self._tower_ms, slower, self._uses = self._elapsed(), self._history.slower, self._first_uses()
        left = self._deadline_ms - self._tower_ms
        usual = [predict(self._costs, self._manifest, planned, text) for planned in possible]
        if self._passes:
            rows = [*map(len, self._passes)]
            usual = [each.of_passes(rows, self._costs.pass_row) for each in usual]
        options = [_Option(planned, own, slower.of(own)) for planned, own in zip(possible, usual, strict=True)]
        whole = next((one for one in options if one.expected.whole(self._most) <= left), None)
        self._chosen = chosen = whole or min(options, key=lambda one: one.expected.first)
        reason = self._reason(options, chosen, left, whole=whole is not None)
        tokens, predicted_first = self._tokens_within(left, chosen.expected), self._tower_ms + chosen.expected.first
        self._report = partial(
            DeadlineReport,
            deadline_ms=self._deadline_ms,
            budget=chosen.planned.budget,
            reason=reason + self._costs.far_above(text + possible[0].rows),
            can_meet=chosen.expected.first <= left,
            expected_tokens=tokens,
            predicted_first_ms=predicted_first,
            predicted_ms=predicted_first + chosen.expected.later(tokens - 1),
            slower=slower.first,
            costs_age_s=self._costs.age_s,
            costs_load=self._costs.load,
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
        if (first := next((one for one in larger if one.expected.first <= left), None)) is not None:
            fitting = self._tokens_within(left, first.expected)
            return f"{reason}; budget {first.planned.budget} would bring {fitting}: {_ADVICE}"
        return f"{reason}; {_ADVICE}" if can_meet and not whole else reason

    def first_token(self) -> None:
        self._first_ms = self._elapsed()

    def finish(self, tokens: int) -> str:
        expected = self._chosen.expected
        in_time = self._elapsed() + expected.later(tokens) - expected.later(tokens - 1) <= self._deadline_ms
        return super().finish(tokens) or ("" if in_time else "deadline")

    def ended(self, token_ms: Sequence[float], *, reused: bool) -> DeadlineReport:
        measured, usual = self._elapsed(), self._chosen.usual
        if not reused and self._first_uses() == self._uses:
            first, count = self._first_ms - self._tower_ms, max(len(token_ms), _ENOUGH_TOKENS)
            missing = usual.later(count) - usual.later(len(token_ms))
            self._history.add(usual, first, sum(token_ms) + missing * first / usual.first, count)
        return self._report(met=measured <= self._deadline_ms, first_ms=self._first_ms, measured_ms=measured)

    def _tokens_within(self, left: float, expected: Prediction) -> int:
        """Return how many tokens fit into `left` milliseconds after the tower; one is always written."""
        return 1 + expected.within(left - expected.first, self._most - 1)

    def _elapsed(self) -> float:
        return (self._now() - self._began) * 1e3


def up_to(budget: str) -> str:
    """Return words about the largest budget that a deadline may choose, or "" where all may be chosen."""
    return "" if budget == UNPRUNED else f" up to {budget}"


def _counted(tokens: int) -> str:
    return {1: "one token", 2: "both tokens"}.get(tokens, f"all {tokens} tokens")


def check_chosen_after_tower(manifest: Manifest, method: str) -> None:
    """Raise `UsageError` for a method whose budget cannot be chosen after the vision tower, by its tokens.

    Deadlines choose so. Raises `BudgetError` for a method that the bundle does not have.
    """
    manifest.plan(method, UNPRUNED)
    if any(each.picture_share for each in manifest.plans[method].values()):
        raise UsageError(
            f"method '{method}' makes pictures smaller before the vision tower runs, and deadlines choose "
            "a budget afterwards. Give one budget and no deadline, or another method."
        )
