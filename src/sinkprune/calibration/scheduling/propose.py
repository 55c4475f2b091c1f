"""Proposes a budget for a bundle on this machine: measures, searches, and tries the best plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from PIL import Image

from sinkprune.calibration.evaluation.replies import collect_replies
from sinkprune.calibration.evaluation.report import BASELINE, Combination
from sinkprune.calibration.scheduling import grid
from sinkprune.calibration.scheduling.attention import Measurements, attend, space_of
from sinkprune.calibration.scheduling.named_budget import METHOD
from sinkprune.calibration.scheduling.other_cuts import other_cuts
from sinkprune.calibration.scheduling.report import Candidate, ScheduleReport
from sinkprune.calibration.scheduling.search import (
    Found,
    MeanTokens,
    Milliseconds,
    best_of_each_sanitizer,
    cheapest,
)
from sinkprune.calibration.scheduling.trials import TRIAL, Trials
from sinkprune.calibration.tasks import Item
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.costs.model import Prediction, predict
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.reports.report import Spread
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.deadline.cost_measuring import rounds
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.pictures import layout_of
from sinkprune.runtime.steps.request import new_request

SECONDS = 5.0
"""About how long to measure the costs, and again the budget that was found."""
_CLOSER = 4
"""Budgets that are compared by their answers to questions."""
_ROUNDS = 4
"""Searches, repeated while the machine's speed changes."""
_NEAR = 0.08
"""The largest error of a prediction, as a share of the measured time."""
_UNPRUNED = Combination(METHOD, UNPRUNED)


def nearest_target(least: float) -> str:
    """Return the target to suggest after a budget took `least`, with a tenth to spare."""
    return f"{math.ceil(1.1 * least):d}"


TOKENS_A_LAYER = "visual tokens a layer"


class Target(NamedTuple):
    """What a budget must meet: milliseconds to the last of `new_tokens`, or a mean of visual tokens a layer."""

    ms: float | None
    tokens: float | None
    new_tokens: int = 1

    @property
    def option(self) -> str:
        """The option that sets the target."""
        return "--budget-tokens" if self.ms is None else "--target-ms"

    def check_unmet(self, unpruned: float, unit: str) -> None:
        """Raise `BudgetError` if the unpruned model, which takes `unpruned` of this unit, meets the target."""
        wanted = (self.tokens or 0.0) if self.ms is None else self.ms
        if unpruned <= wanted:
            raise BudgetError(
                f"no pruning is needed: unpruned, the model takes up to {unpruned:.0f} {unit} here, and "
                f"{self.option} is {wanted:g}. Run it with --budget {UNPRUNED}, or give a smaller target."
            )


class Prompt(NamedTuple):
    """A picture and a question about it."""

    image: Image.Image
    question: str


class Proposer:
    """Proposes budgets for a bundle on this machine, from measurements that it makes when it is created."""

    def __init__(
        self, trials: Trials, pipeline: Pipeline, prompts: Sequence[Prompt], seconds: float = SECONDS
    ) -> None:
        """Measure the costs of the first prompt for some `seconds`, and the attention of all prompts.

        Raises `BudgetError` for a bundle without the method, and what a request raises.
        """
        self._trials, self._pipeline, self._seconds = trials, pipeline, seconds
        self._manifest, self._first = trials.bundle.manifest, prompts[0]
        if not self._manifest.plans.get(METHOD):
            raise BudgetError(
                f"this bundle holds no budget of method '{METHOD}', so it may be cut where nothing is to be dropped. "
                f"Export it again with --methods {METHOD}."
            )
        request = new_request(self._first.image, self._first.question, method=METHOD)
        self.costs = pipeline.measure_costs(request, seconds)
        self._layout = layout_of(self._first.image, self._first.image, pipeline.family, self._manifest)
        self._text = pipeline.prompts.encode(request.texts).text_tokens
        self._sanitizers = {f"keep {number}": budget for number, budget in enumerate(grid.sanitizers(self._manifest))}
        for name, budget in self._sanitizers.items():
            trials.add(name, budget, ())
        attended = [attend(pipeline, *each, [*self._sanitizers]) for each in prompts]
        kept = [self._schedule(name).rows for name in self._sanitizers]
        sizes = grid.sizes(self._manifest)
        self._measurements = Measurements(attended, self._manifest.cut_after, kept, sizes, self._layout.all_tokens)
        self._layers = tuple(map(len, self._manifest.segments))
        self._space = space_of(self._measurements, self._manifest.cut_after, sum(self._layers))
        self._count, self._tail = 0, 1.0

    def propose(self, name: str, target: Target, items: Sequence[Item]) -> ScheduleReport:
        """Return the budget that meets the target and drops the least attention, or answers most of `items` if any.

        A target in milliseconds is met if 95 of 100 measured requests take no longer. Raises `BudgetError` if no
        budget meets the target, or if the unpruned model does.
        """
        self._check_pruning_needed(target)
        report = self._tried(name, target, self._found(target, items), items)
        for _ in range(_ROUNDS - 1):
            if abs(report.off) <= _NEAR and report.meets(target.ms):
                break
            self._follow(report.measured_ms, report.chosen.predicted_ms)
            try:
                found = self._found(target, items)
            except BudgetError:
                # The machine is slower now, and no budget meets the target any more.
                break
            tried = self._tried(name, target, found, items)
            if report.meets(target.ms) and not tried.meets(target.ms):
                break
            report = tried
        return report

    def _tried(self, name: str, target: Target, found: Sequence[Found], items: Sequence[Item]) -> ScheduleReport:
        """Try the `found` plans, and report the best."""
        price, limit = self._price(target)
        names = [self._try(each) for each in found]
        rated = self._rate(names, items)
        candidates = {
            each: self._candidate(each, plan.lost, rated.get(each), target.new_tokens)
            for each, plan in zip(names, found, strict=True)
        }
        best = max(names, key=lambda each: (candidates[each].accuracy or 0.0, -candidates[each].lost))
        measured, unpruned = self._measure([Combination(TRIAL, best), _UNPRUNED], target.new_tokens)
        return ScheduleReport(
            name=name,
            pictures=len(self._measurements.attended),
            visual_tokens=self._layout.all_tokens,
            prompt_tokens=self._text,
            new_tokens=target.new_tokens,
            costs=self.costs,
            unpruned_ms=self._unpruned(target),
            unpruned_accuracy=rated.get(UNPRUNED),
            chosen=candidates.pop(best),
            others=tuple(candidates.values()),
            measured_ms=measured,
            unpruned_measured_ms=unpruned,
            other_cuts=tuple(other_cuts(self._manifest, self._trials.facts, self._measurements, price, limit)),
        )

    def _unpruned(self, target: Target) -> float:
        planned = schedule(self._manifest, METHOD, UNPRUNED, [self._layout])
        return self._predict(planned).latency(target.new_tokens)

    def _price(self, target: Target) -> tuple[Milliseconds | MeanTokens, float]:
        if target.ms is None:
            return MeanTokens(self._layers), target.tokens or 0.0
        projector = self._manifest.projector is not None
        tokens = self._layout.all_tokens
        return (
            Milliseconds(self.costs, self._layers, self._text, tokens, projector, target.new_tokens),
            target.ms / self._tail,
        )

    def _follow(self, measured: Spread, predicted_ms: float) -> None:
        """Scale the costs, which are medians, to the present speed, and the target to the slowest requests."""
        self.costs = self.costs.slower(measured.median / predicted_ms)
        self._tail = measured.p95 / measured.median

    def _check_pruning_needed(self, target: Target) -> None:
        """Raise `BudgetError` if the unpruned model meets the target."""
        if target.ms is None:
            target.check_unmet(self._layout.all_tokens, TOKENS_A_LAYER)
        elif (predicted := self._unpruned(target)) <= target.ms:
            (measured,) = self._measure([_UNPRUNED], target.new_tokens)
            self._follow(measured, predicted)
            target.check_unmet(measured.p95, "ms in 95 of 100 requests")

    def _found(self, target: Target, items: Sequence[Item]) -> list[Found]:
        """Return the best plans that are predicted to meet the target; raises `BudgetError` if there is none."""
        price, limit = self._price(target)
        found = best_of_each_sanitizer(self._space, price, limit)[: _CLOSER if items else 1]
        if found:
            return found
        if target.ms is not None and self._tail == 1.0:
            # Nothing was measured since the costs: how slow are the slowest requests?
            (measured,) = self._measure([_UNPRUNED], target.new_tokens)
            self._follow(measured, self._unpruned(target))
            price, limit = self._price(target)
        least = cheapest(self._space, price) * self._tail
        unit, wanted, whole = (
            (TOKENS_A_LAYER, target.tokens, self._layout.all_tokens)
            if target.ms is None
            else ("ms", target.ms, self._unpruned(target) * self._tail)
        )
        raise BudgetError(
            f"no budget takes as little as {wanted:g} {unit} here: the least is {least:.1f}, unpruned it is "
            f"{whole:.0f}. The nearest that one may meet is {target.option} {nearest_target(least)}. Give that, "
            "smaller pictures, or weights in int8 or int4."
        )

    def _try(self, found: Found) -> str:
        """Add a plan to the trials, and return its name there."""
        self._count += 1
        name, sanitizer = f"found {self._count}", [*self._sanitizers.values()][found.sanitizer]
        stages = tuple(self._measurements.sizes[size] for size in found.sizes)
        cuts = [self._manifest.cut_after[stage] for stage in found.stages]
        self._trials.add(name, replace(sanitizer, stages=stages), cuts)
        return name

    def _rate(self, names: Sequence[str], items: Sequence[Item]) -> dict[str, float]:
        """Return the fraction of right answers to `items` at each trial budget, and unpruned; empty without items."""
        if not items:
            return {}
        replies = collect_replies(self._pipeline, items, [Combination(TRIAL, name) for name in names])
        right: dict[str, list[bool]] = {}
        for reply in replies:
            name = UNPRUNED if reply.combination == BASELINE else reply.combination.budget
            right.setdefault(name, []).append(reply.right)
        return {name: sum(each) / len(each) for name, each in right.items()}

    def _candidate(self, name: str, lost: float, accuracy: float | None, new_tokens: int) -> Candidate:
        planned, layers = self._schedule(name), range(sum(self._layers))
        stages = tuple(planned.plan.cuts) if planned.plan else ()
        return Candidate(
            budget=self._manifest.budgets[name],
            stages_after=stages,
            rows=(planned.rows, *(sum(planned.kept_after(layer)) for layer in stages)),
            mean_visual_tokens=sum(map(planned.reaching, layers)) / len(layers),
            lost=lost,
            accuracy=accuracy,
            predicted_ms=self._predict(planned).latency(new_tokens),
        )

    def _measure(self, turns: Sequence[Combination], new_tokens: int) -> list[Spread]:
        """Return the milliseconds of each of the `turns`, which take turns in each round."""
        latencies = [list[float]() for _ in turns]
        for counted in rounds(self._seconds):
            for (method, budget), own in zip(turns, latencies, strict=True):
                answer = self._pipeline.generate(
                    *self._first,
                    method=method,
                    budget=budget,
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                )
                if counted:
                    own.append(answer.ms["latency"] or 0.0)
        return [Spread.of(own) for own in latencies]

    def _schedule(self, name: str) -> Schedule:
        return schedule(self._manifest, TRIAL, name, [self._layout])

    def _predict(self, planned: Schedule) -> Prediction:
        return predict(self.costs, self._manifest, planned, self._text, [self._layout])
