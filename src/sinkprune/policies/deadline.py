"""Chunks with a deadline: what they cost, and the budget and the denoising steps that are expected in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import accumulate
from statistics import mean, median

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import counted
from sinkprune.contract.errors import DeadlineError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.progress import OnProgress
from sinkprune.deadlines.costs import LEAST_ACTION_MS, ActionCosts, BudgetCosts, Place, Prediction
from sinkprune.deadlines.measuring import MeasurementRounds
from sinkprune.deadlines.policy import MARGIN, Now, RequestHistory, up_to
from sinkprune.policies.observation import STEPS
from sinkprune.policies.report import ActionDeadline, ActionReport
from sinkprune.runtime.steps.request import DEFAULT_METHOD

MEASURED_STEPS = 2
"""Denoising steps of a measured chunk: the later ones read what the first has brought into the processor's caches."""
Act = Callable[[str, int], tuple[float, ActionReport]]
"""Runs a chunk at a budget, with a number of denoising steps. Returns when its vision tower was done, in seconds of
`time.perf_counter`, and the chunk."""


def measure_costs(
    act: Act,
    method: str,
    budgets: Sequence[str],
    frames: int,
    steps: int,
    place: Place,
    seconds: float,
    progress: OnProgress,
) -> ActionCosts:
    """Return the costs of chunks of so many `steps` at each of `budgets`, as medians over about `seconds`.

    Budgets run in turn, those that keep the most tokens first. Raises what `act` raises.
    """
    runs: dict[str, list[tuple[float, float]]] = {budget: [] for budget in budgets}
    reports = dict[str, ActionReport]()
    rounds = MeasurementRounds("measuring costs", seconds, len(budgets), progress)
    for measured in rounds:
        for budget, own in runs.items():
            began, report = act(budget, steps)
            whole = (time.perf_counter() - began) * 1e3
            reports[budget] = report
            rounds.complete_part()
            if measured:
                own.append((whole - sum(report.step_ms), sum(report.step_ms) / steps))
    costs = dict[str, BudgetCosts]()
    for budget, own in runs.items():
        before, step = (max(median(ms), LEAST_ACTION_MS) for ms in zip(*own, strict=True))
        rows = reports[budget].prompt_tokens + mean(reports[budget].tokens_per_layer)
        costs[budget] = BudgetCosts(before, step, rows)
    pruned = [budget for budget in budgets if budget != UNPRUNED]
    costs |= dict(zip(pruned, accumulate((costs[budget] for budget in pruned), _at_most), strict=True))
    text = max(report.prompt_tokens for report in reports.values())
    return ActionCosts(method, frames, costs, place=place, prompt_tokens=text)


def _at_most(larger: BudgetCosts, own: BudgetCosts) -> BudgetCosts:
    """Return a budget's `own` costs, at most those of a `larger` one: load may make fewer rows seem slower."""
    return replace(own, before_ms=min(larger.before_ms, own.before_ms), step_ms=min(larger.step_ms, own.step_ms))


FEWEST_STEPS = 5
"""The default of `min_steps`. The steps integrate one field of velocities: more of them make its path finer, and
change nothing that the expert reads."""


@dataclass
class ChunkDeadline:
    """The deadline of one chunk: it chooses a budget and a number of steps, and reports whether they were in time.

    It chooses the largest budget, up to `budget`, whose chunk is expected in time with `least_steps`, and as many
    steps as fit, up to `most_steps`. So fewer steps come before a smaller budget: a dropped token is lost, and fewer
    steps only follow the same path less finely. `least_steps` equal to `most_steps` prunes first. If no budget fits,
    the fastest by measured costs runs at `least_steps`.
    """

    costs: ActionCosts
    history: RequestHistory
    _: KW_ONLY
    began: float
    """The time of the clock `now` from which `deadline_ms` count."""
    frames: int
    """The number of cameras with a frame."""
    deadline_ms: float
    budget: str
    most_steps: int
    least_steps: int
    now: Now = time.perf_counter
    _spent_ms: float = field(init=False)
    """From the call of `act` to the end of the vision tower, when budget and steps were chosen."""
    _usual: Prediction = field(init=False)
    """What the costs predict of the chosen budget: `first` before the expert, `token` for a step."""
    _report: partial[ActionDeadline] = field(init=False)
    """Lacks the measured time."""

    def choose(self, text: int) -> tuple[str, int]:
        """Return the budget and the steps for a prompt with so many text tokens, when the vision tower is done."""
        self._spent_ms, slower, least = self._elapsed(), self.history.slower, self.least_steps
        costs = self.costs.of_chunk(text, self.frames)
        names = [*costs]
        names = names[names.index(self.budget) :]
        expected = {name: slower.of(_prediction(costs[name])) for name in names}
        left = self.deadline_ms - self._spent_ms
        fitting = [name for name, one in expected.items() if one.first + least * one.token <= left]
        cap, enough = up_to(self.budget), counted(least, "step")
        if fitting:
            chosen = fitting[0]
            fit = math.floor((left - expected[chosen].first) / expected[chosen].token)
            steps = max(least, min(self.most_steps, fit))
            reason = f"the largest budget{cap} that is expected in time with {enough} or more"
        else:
            chosen, steps = _fastest({name: costs[name].chunk_ms(least) for name in names}), least
            reason = (
                f"no budget{cap} is expected in time with {enough}, so the fastest runs; allow fewer with min_steps "
                "(--min-steps), or a later deadline"
            )
        self._usual = _prediction(costs[chosen])
        self._report = partial(
            ActionDeadline,
            deadline_ms=self.deadline_ms,
            budget=chosen,
            steps=steps,
            reason=reason,
            can_meet=bool(fitting),
            expected_ms=self._spent_ms + expected[chosen].first + steps * expected[chosen].token,
            slower=slower.first,
            costs_age_s=self.costs.age_s,
            costs_load=self.costs.load,
        )
        return chosen, steps

    def report(self, step_ms: Sequence[float], *, comparable: bool = True) -> ActionDeadline:
        """Return how the chunk met the deadline, now that it is complete, and add its times to the history.

        `step_ms` are the milliseconds of its denoising steps. `comparable` is whether costs are those of such a
        chunk: it loaded no graph, and is not the first.
        """
        measured, steps_ms = self._elapsed(), sum(step_ms)
        if comparable:
            self.history.add(self._usual, measured - self._spent_ms - steps_ms, steps_ms, len(step_ms))
        return self._report(met=measured <= self.deadline_ms, measured_ms=measured)

    def _elapsed(self) -> float:
        return (self.now() - self.began) * 1e3


def _prediction(costs: BudgetCosts) -> Prediction:
    return Prediction(first=costs.before_ms, token=costs.step_ms)


def _fastest(ms: Mapping[str, float]) -> str:
    """Return the smallest of the budgets whose chunk takes about the least milliseconds; `ms` has it last."""
    # By measured costs: recent slowdowns differ between the parts of a chunk, and would reorder budgets that cost
    # nearly the same.
    least = min(ms.values())
    return [name for name, own in ms.items() if own <= MARGIN * least][-1]


def check_costs(costs: ActionCosts, manifest: Manifest, method: str, budget: str, frames: int) -> None:
    """Raise `DeadlineError` unless `costs` are of this bundle's `method` and `budget`, with so many `frames`."""
    other = "" if method == DEFAULT_METHOD else f", method={method!r}"
    again = (
        f"Measure them for these, with policy.warm_up(cameras, instruction, state{other}) or sinkprune-act "
        f"{f'--method {method} ' if other else ''}--warm-up."
    )
    if costs.method != method or budget not in costs.budgets:
        raise DeadlineError(
            f"a deadline was given, and the costs of method '{method}' at budget '{budget}' are not known, but those "
            f"of method '{costs.method}' at {', '.join(costs.budgets)}. {again}"
        )
    if frames > costs.frames:
        raise DeadlineError(
            f"{counted(frames, 'camera')} have a frame, and the costs were measured with {costs.frames}. {again}"
        )
    # The bundle may have been exported again since.
    if gone := [name for name in costs.budgets if name != UNPRUNED and name not in manifest.plans[method]]:
        raise DeadlineError(f"the costs are of budget '{gone[0]}', which the bundle does not have. {again}")


def least_steps(given: int | None, most: int, deadline_ms: float | None) -> int:
    """Return the fewest steps of a chunk with a deadline; raises `UsageError`."""
    if given is None:
        return min(FEWEST_STEPS, most)
    if deadline_ms is None:
        raise UsageError("min_steps is for a deadline, and there is none. Give deadline_ms, or leave min_steps out.")
    least = STEPS.named("min_steps").check(given)
    check_least_steps(least, most, "min_steps", "steps")
    return least


def check_least_steps(least: int, most: int, least_name: str, most_name: str) -> None:
    """Raise `UsageError`, with the names of both, if the fewest steps are more than the most."""
    if least > most:
        raise UsageError(
            f"{least_name} is {least} and {most_name} {most}, expected a minimum that is no larger. Lower "
            f"{least_name}, or raise {most_name}."
        )
