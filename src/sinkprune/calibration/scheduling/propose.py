"""Proposes budgets: where layers can drop visual tokens, how many, and what attention of the text that loses."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np
from PIL import Image

from sinkprune.calibration.attention import received_attention
from sinkprune.calibration.evaluation.replies import Combination, collect_replies
from sinkprune.calibration.questions import PictureQuestion
from sinkprune.calibration.scheduling.report import Candidate, OtherCuts, ScheduleReport, few_requests
from sinkprune.calibration.scheduling.search import (
    METHOD,
    TRIAL,
    UNPRUNED_MODEL,
    FoundPlan,
    LatencyPrice,
    MeanTokensPrice,
    PlanSpace,
    Price,
    RequestTimes,
    Trials,
    best_of_each_sanitizer,
    cheapest,
)
from sinkprune.calibration.tasks import Item
from sinkprune.contract.budgets import FAMILIES, UNPRUNED, Budget, Share
from sinkprune.contract.errors import BudgetError, NumericsError
from sinkprune.contract.manifest import Manifest, decoder_segments
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.deadlines.costs import LOADED
from sinkprune.deadlines.pipeline import Pipeline
from sinkprune.export.methods import METHODS
from sinkprune.export.pruning.plan import Method, PlanFacts
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import encode, run_tower
from sinkprune.runtime.steps.prompt_rows import lay_out


class PictureAttention(NamedTuple):
    """The measured attention to a picture of T visual tokens."""

    received: Array
    """[C,T]: the attention that each token receives from the text after the picture, in the layer before each cut.

    Means over heads and rows, like the scores of the method's stages.
    """
    kept: list[Array]
    """The tokens that each sanitizer keeps; the token of largest norm stands for the sink."""


def measure_attention(
    pipeline: Pipeline, image: Image.Image, question: str, sanitizers: Sequence[str]
) -> PictureAttention:
    """Run the unpruned model on a picture and a question, and the sanitizers of the trial plans of these names.

    Raises what a request raises.
    """
    manifest, chain, backend = pipeline.bundle.manifest, pipeline.chain, pipeline.backend
    clock = Stopwatch(backend)
    layout, tower = pipeline.family.layout(image), run_tower(chain, pipeline.family.inputs(image), clock)
    plans = [manifest.plans[TRIAL][name] for name in sanitizers]
    kept = [encode(chain, plan, tower, clock).source_tokens for plan in plans]
    texts = pipeline.prompts.encode(["", question], [layout.texts]).texts
    encoded, between = encode(chain, None, tower, clock), pipeline.family.between_rows
    rows = lay_out(backend, pipeline.embedding, between, texts, [layout], [encoded], pruned=False)
    # Rows at the end of a line have no token.
    source, received = layout.unpruned_rows, []
    cos, sin = (backend.tensor(table) for table in chain.rotary.tables(rows.positions.rows))
    hidden, added = rows.hidden, rows.deepstack_inputs
    for decoder in chain.decoders[:-1]:
        outputs = decoder({"hidden": hidden, "cos": cos, "sin": sin, **added}, decoder.new_cache())
        # DeepStack's rows are inputs of the first segment only.
        hidden, added = outputs["hidden_out"], {}
        attention, tokens = received_attention(backend, outputs, rows), np.zeros(layout.all_tokens)
        np.add.at(tokens, source[source >= 0], attention[source >= 0])
        received.append(tokens)
    if not np.isfinite(received).all() or not np.sum(received, axis=1).all():
        raise NumericsError("the text's attention to the picture is zero or not finite: it cannot choose a budget.")
    return PictureAttention(np.stack(received), kept)


def dropped_attention(
    attended: Sequence[PictureAttention], sizes: Sequence[Share], selects: Sequence[int], seen: Sequence[int]
) -> tuple[Array, Array]:
    """Return `lost_before` [A,S] and `lost_after` [A,C,S,M] of `PlanSpace`: dropped attention, mean over pictures.

    `selects` [C] are the cuts whose attention ranks the tokens of the stage after each segment. `seen` [S] are the
    cuts whose attention stands for each segment: its own, and for the last segment the one before. Both are numbers
    of measured cuts, possibly repeated.
    """
    sanitizers = len(attended[0].kept)
    before = np.zeros((sanitizers, len(seen)))
    after = np.zeros((sanitizers, len(selects), len(seen), len(sizes)))
    for one in attended:
        share = one.received / one.received.sum(axis=1, keepdims=True)
        counts = np.array([size.of(share.shape[1]) for size in sizes])
        for number, kept in enumerate(one.kept):
            before[number] += 1 - share[seen][:, kept].sum(axis=1)
            for place, cut in enumerate(selects):
                # A stage breaks ties in favour of the earlier token.
                ranked = kept[np.argsort(-share[cut, kept], kind="stable")]
                left = np.cumsum(share[seen][:, ranked], axis=1)
                after[number, place] += 1 - left[:, np.minimum(counts, len(ranked)) - 1]
    return before / len(attended), after / len(attended)


class Measurements(NamedTuple):
    """The attention to all pictures, and the sanitizers and sizes to choose from."""

    attended: Sequence[PictureAttention]
    measured: Sequence[int]
    """The layers (0-based, ascending) whose attention is known: those after which the bundle is cut."""
    kept: Sequence[int]
    """Rows that each sanitizer keeps of the picture that prices are for."""
    sizes: Sequence[Share]
    tokens: int
    """Visual tokens of that picture."""


def plan_space(measurements: Measurements, cut_after: Sequence[int], num_layers: int) -> PlanSpace:
    """Return the plans of a decoder of `num_layers` that is cut after the layers `cut_after`.

    For a layer whose attention is unknown, a stage uses the nearest known layer before it, and a segment the nearest
    known layer after it.
    """
    last = len(measurements.measured) - 1
    segments = decoder_segments(cut_after, num_layers)
    selects = [max(0, bisect_right(measurements.measured, cut) - 1) for cut in cut_after]
    seen = [min(last, bisect_left(measurements.measured, layers[-1])) for layers in segments]
    before, after = dropped_attention(measurements.attended, measurements.sizes, selects, seen)
    rows = np.array([size.of(measurements.tokens) for size in measurements.sizes])
    return PlanSpace(tuple(map(len, segments)), np.array(measurements.kept), rows, before, after)


_SANITIZERS, _SIZES = 14, 32
"""Points of the grid besides the family's own."""
_LEAST, _MOST = 0.02, 0.8
"""Shares of a picture's tokens."""


def _denominator(manifest: Manifest) -> int:
    """Return the denominator of shares: the tokens of a group, or 1000 if groups differ."""
    return 1000 if manifest.any_resolution else manifest.most_visual_tokens


def sanitizers(manifest: Manifest) -> list[Budget]:
    """Return budgets without stages, each with the share of salient tokens of the family's nearest budget."""
    whole, rows = _denominator(manifest), FAMILIES[manifest.family].budgets.values()
    shares = [[part.numerator / part.denominator for part in (row.reserve, row.diverse)] for row in rows]
    own = {reserve + diverse: reserve for reserve, diverse in shares}
    found = [Budget(budget.reserve, budget.diverse, ()) for budget in rows]
    for kept in np.geomspace(_LEAST, _MOST, _SANITIZERS):
        nearest = min(own, key=lambda share: abs(share - kept))
        chosen = max(2, round(whole * float(kept)))
        reserve = min(max(1, round(chosen * own[nearest] / nearest)), chosen - 1)
        found.append(Budget(Share(reserve, whole), Share(chosen - reserve, whole), ()))
    # The grid may repeat the family's, in other fractions. The first of equal counts stays: the family's.
    by_counts: dict[tuple[int, int], Budget] = {}
    for budget in found:
        by_counts.setdefault((budget.reserve.of(whole), budget.diverse.of(whole)), budget)
    return [*by_counts.values()]


def sizes(manifest: Manifest) -> list[Share]:
    whole = _denominator(manifest)
    between = {max(1, round(whole * float(left))) for left in np.geomspace(_LEAST / 2, _MOST, _SIZES)}
    own = {stage.of(whole) for budget in FAMILIES[manifest.family].budgets.values() for stage in budget.stages}
    return [Share(left, whole) for left in sorted(between | own)]


IN_LLM = ("fastv", "pyramiddrop", "sparsevlm")
"""The methods whose layers are tried."""


def other_cuts(
    manifest: Manifest,
    facts: PlanFacts,
    measurements: Measurements,
    price: LatencyPrice | MeanTokensPrice,
    limit: float,
) -> Iterable[OtherCuts]:
    """Yield the best budget of at most `limit` with the cuts of each method that the bundle lacks."""
    own, layers = manifest.cut_after, manifest.language_model.num_layers
    for method in IN_LLM:
        build = METHODS[method]
        cuts = tuple(sorted({*own, *_cuts_of(build, manifest, facts)}))
        if cuts == own:
            continue
        best = best_of_each_sanitizer(plan_space(measurements, cuts, layers), _recut(price, own, cuts, layers), limit)
        if best:
            methods = tuple(name for name in dict.fromkeys([METHOD, *manifest.plans, method]) if name != TRIAL)
            stages = tuple(cuts[stage] for stage in best[0].stages)
            yield OtherCuts(methods, cuts, stages, best[0].lost)


def _cuts_of(build: Method, manifest: Manifest, facts: PlanFacts) -> list[int]:
    """Return the layers after which a method drops tokens; none if it cannot be built for the model."""
    for budget in FAMILIES[manifest.family].budgets.values():
        try:
            return [*build(facts, budget).select_after]
        except BudgetError:
            continue
    return []


def _recut(
    price: LatencyPrice | MeanTokensPrice, own: tuple[int, ...], cuts: tuple[int, ...], num_layers: int
) -> Price:
    """Return the prices of plans with other cuts; every layer of a segment costs the same share of it."""
    segments = decoder_segments(cuts, num_layers)
    layers = tuple(map(len, segments))
    if isinstance(price, MeanTokensPrice):
        return MeanTokensPrice(layers)
    whole = decoder_segments(own, num_layers)
    decoders = []
    for segment in segments:
        number = bisect_left(own, segment[-1])
        decoders.append(price.costs.decoders[number].slower(len(segment) / len(whole[number])))
    return replace(price, costs=replace(price.costs, decoders=tuple(decoders)), layers=layers)


SECONDS = 5.0
"""About how long to measure the costs, and again the budget that was found."""
TOKENS_A_LAYER = "visual tokens a layer"
_OF_REQUESTS = "ms in 95 of 100 requests"
_CANDIDATES = 4
"""Budgets that are compared by their answers to questions."""
_SEARCHES = 6
"""How many times to search at most: the machine's speed changes, and percentiles of few requests are rough."""
_FULL = 0.9
"""The share of a target that a budget's 95th percentile must take, so that no larger budget is searched."""
_WORTH = 0.02
"""The share of attention that a larger budget must save to be tried."""
_CHEAPEST_TRIES = 2
"""How many times the cheapest budget must miss the target before the target is rejected."""


def nearest_target(least: float) -> int:
    """Return the target to suggest after the cheapest budget took `least`, with a tenth to spare."""
    return math.ceil(1.1 * least)


class BudgetTarget(NamedTuple):
    """What a budget must meet: milliseconds to the last of `new_tokens`, or a mean of visual tokens a layer."""

    ms: float | None
    tokens: float | None
    new_tokens: int = 1

    @property
    def option(self) -> str:
        """The option that sets the target."""
        return "--budget-tokens" if self.ms is None else "--target-ms"

    @property
    def wanted(self) -> float:
        return (self.tokens or 0.0) if self.ms is None else self.ms

    def check_unmet(self, unpruned: float, unit: str, note: str = "") -> None:
        """Raise `BudgetError`, with the `note`, if the unpruned model meets the target with `unpruned` of a unit."""
        if unpruned <= self.wanted:
            raise BudgetError(
                f"no budget was added, because no pruning is needed: unpruned, the model takes up to {unpruned:.0f} "
                f"{unit} here, and {self.option} is {self.wanted:g}. Run it with --budget {UNPRUNED}, or give a "
                f"smaller target.{note}"
            )


class Proposer:
    """Proposes budgets for a bundle on this machine, from measurements that it makes when it is created."""

    def __init__(
        self,
        trials: Trials,
        pipeline: Pipeline,
        prompts: Sequence[PictureQuestion],
        seconds: float = SECONDS,
        progress: OnProgress = unreported,
    ) -> None:
        """Measure the costs of the first prompt for some `seconds`, and the attention of all prompts.

        Raises `BudgetError` for a bundle without the method, and what a request raises.
        """
        self._trials, self._pipeline, self._progress = trials, pipeline, progress
        manifest = trials.bundle.manifest
        if not manifest.plans.get(METHOD):
            raise BudgetError(
                f"this bundle holds no budget of method '{METHOD}', so it may be cut where nothing is to be dropped. "
                f"Export it again with --methods {METHOD}."
            )
        self.times = RequestTimes(pipeline, prompts[0], seconds, progress)
        self._sanitizers = {f"keep {number}": budget for number, budget in enumerate(sanitizers(manifest))}
        for name, budget in self._sanitizers.items():
            trials.add(name, budget, ())
        self._measurements = Measurements(
            attended=[self._attention(number, prompts) for number in range(len(prompts))],
            measured=manifest.cut_after,
            kept=[self.times.schedule(Combination(TRIAL, name)).rows for name in self._sanitizers],
            sizes=sizes(manifest),
            tokens=self.times.layout.all_tokens,
        )
        self._space = plan_space(self._measurements, manifest.cut_after, manifest.language_model.num_layers)
        # Predicted times as shares of the unpruned model's, which corrections of the costs leave as they are.
        self._largest_met, self._least_missed = 0.0, math.inf
        self.nearest: float | None = None
        """The nearest target that a budget may meet, once `propose` has rejected one and pruning gains enough."""

    def propose(self, name: str, target: BudgetTarget, items: Sequence[Item]) -> ScheduleReport:
        """Return the budget that meets the target and drops the least attention, or answers most of `items` if any.

        A target in milliseconds is met if 95 of 100 measured requests take no longer. While a budget leaves much of
        the time, larger ones are tried: by the corrected costs, or between the largest that met the target and the
        smallest that missed it. The best that met it is reported. If none did, the report holds the last one, and the
        nearest target. Raises `BudgetError` if the unpruned model meets the target, or if no budget was expected to,
        and the cheapest was measured and does not.
        """
        self._check_pruning_needed(target)
        best = missed = None
        misses, searches = list[ScheduleReport](), 0
        while len(misses) < _CHEAPEST_TRIES:
            plans = self._find_plans(target, _CANDIDATES if items else 1) if searches < _SEARCHES else []
            if best and target.ms is not None and plans:
                # Go on while a budget leaves much of the time, and a larger one would save attention.
                full = best.measured_ms.p95 >= _FULL * target.ms
                if full or plans[0].lost >= best.chosen.lost - _WORTH:
                    break
            elif best:
                break
            latest = self._try_plans(name, target, plans or [self._cheapest(target)], items)
            searches += 1
            share = latest.chosen.predicted_ms / latest.unpruned_ms
            if latest.meets(target.ms):
                self._largest_met = max(self._largest_met, share)
                best = (
                    latest
                    if best is None
                    else max(best, latest, key=lambda report: (report.chosen.accuracy or 0.0, -report.chosen.lost))
                )
            else:
                self._least_missed = min(self._least_missed, share)
                if plans:
                    missed = latest
                else:
                    misses.append(latest)
            self.times.correct(latest.measured_ms, latest.chosen.predicted_ms)
        if best:
            if target.ms is not None:
                # Where the machine was slower while the costs were measured.
                target.check_unmet(best.unpruned_measured_ms.p95, _OF_REQUESTS, self._note_on_requests())
            return replace(best, searches=searches)
        # By the rule that accepts a budget: the measured 95th percentile.
        slowest = max(misses, key=lambda miss: miss.measured_ms.p95)
        least, unpruned = slowest.measured_ms.p95, slowest.unpruned_measured_ms.p95
        if missed is None:
            raise self._unreachable(target, _OF_REQUESTS, least, unpruned, self._note_on_requests())
        return replace(missed, searches=searches, nearest_target_ms=nearest_target(least), cheapest_p95_ms=least)

    def _attention(self, number: int, prompts: Sequence[PictureQuestion]) -> PictureAttention:
        self._progress("measuring attention", number, len(prompts), "pictures")
        return measure_attention(self._pipeline, *prompts[number], [*self._sanitizers])

    def _check_pruning_needed(self, target: BudgetTarget) -> None:
        if target.ms is None:
            target.check_unmet(self.times.layout.all_tokens, TOKENS_A_LAYER)
        elif self.times.predict(UNPRUNED_MODEL, target.new_tokens) <= target.ms:
            predicted = self.times.predict(UNPRUNED_MODEL, target.new_tokens)
            [measured] = self.times.measure([UNPRUNED_MODEL], target.new_tokens)
            # The predictions are corrected by it.
            self.times.correct(measured, predicted)
            target.check_unmet(measured.p95, _OF_REQUESTS, self._note_on_requests())

    def _note_on_requests(self) -> str:
        """Return sentences, each after a space, on what makes the last measured times uncertain, if anything."""
        few, costs = few_requests(self.times.requests), self.times.costs
        note, load = f" {few}." if few else "", costs.load or 0.0
        if load > LOADED:
            note += f" Other programs took {100 * load:.0f} % of the processors meanwhile.{costs.place.thread_hint}"
        return note

    def _find_plans(self, target: BudgetTarget, most: int) -> list[FoundPlan]:
        """Return up to `most` best plans that are predicted to meet the target.

        Raises `BudgetError` if no plan has as few tokens as the target.
        """
        price, limit = self._price_and_limit(target)
        plans = best_of_each_sanitizer(self._space, price, limit)[:most]
        if not plans and target.ms is None:
            raise self._unreachable(
                target, TOKENS_A_LAYER, self._cheapest(target).price, self.times.layout.all_tokens
            )
        return plans

    def _cheapest(self, target: BudgetTarget) -> FoundPlan:
        return cheapest(self._space, self._price_and_limit(target)[0])

    def _price_and_limit(self, target: BudgetTarget) -> tuple[LatencyPrice | MeanTokensPrice, float]:
        """Return the price of plans, and the highest price that meets the target."""
        if target.ms is None:
            return MeanTokensPrice(self._space.layers), target.wanted
        limit, unpruned = target.ms / self.times.p95_ratio, self.times.predict(UNPRUNED_MODEL, target.new_tokens)
        low, high = self._largest_met, self._least_missed
        if 0 < low < high < math.inf and not low < limit / unpruned < high:
            # One of the measurements was disturbed.
            limit = unpruned * (low + high) / 2
        return self.times.price(target.new_tokens), limit

    def _try_plans(
        self, name: str, target: BudgetTarget, plans: Sequence[FoundPlan], items: Sequence[Item]
    ) -> ScheduleReport:
        """Build the plans and answer `items` with each. Measure the best, and report it under `name`."""
        trials = [self._build(plan) for plan in plans]
        accuracies = _accuracies(self._pipeline, trials, items, self._progress)
        candidates = {
            trial: self._candidate(trial, plan.lost, accuracies.get(trial.budget), target.new_tokens)
            for trial, plan in zip(trials, plans, strict=True)
        }
        best = max(trials, key=lambda trial: (candidates[trial].accuracy or 0.0, -candidates[trial].lost))
        measured, unpruned = self.times.measure([best, UNPRUNED_MODEL], target.new_tokens)
        manifest, facts = self._trials.bundle.manifest, self._trials.facts
        return ScheduleReport(
            name=name,
            pictures=len(self._measurements.attended),
            visual_tokens=self.times.layout.all_tokens,
            prompt_tokens=self.times.text_tokens,
            new_tokens=target.new_tokens,
            costs=self.times.costs,
            unpruned_ms=self.times.predict(UNPRUNED_MODEL, target.new_tokens),
            questions=len(items),
            unpruned_accuracy=accuracies.get(UNPRUNED),
            chosen=candidates.pop(best),
            others=tuple(candidates.values()),
            measured_ms=measured,
            unpruned_measured_ms=unpruned,
            requests=self.times.requests,
            other_cuts=tuple(other_cuts(manifest, facts, self._measurements, *self._price_and_limit(target))),
        )

    def _unreachable(
        self, target: BudgetTarget, unit: str, least: float, unpruned: float, note: str = ""
    ) -> BudgetError:
        """Return the error for a target that no budget meets, the `least` of any and a `note`; sets `nearest`."""
        # Numbers of tokens are exact, times are not.
        nearest = math.ceil(10 * least) / 10 if target.ms is None else nearest_target(least)
        self.nearest = nearest if unpruned > nearest else None
        # Other models have as many tokens of every picture, and weights change times only.
        smaller = self._trials.bundle.manifest.any_resolution
        if self.nearest is not None:
            others = ["smaller pictures"] * smaller + ["weights in int8 or int4"] * (target.ms is not None)
            *first, last = ["that", *others]
            advice = f"The nearest that one may meet is {target.option} {nearest:g}. Give "
            advice += f"{', '.join(first)}, or {last}." if first else f"{last}."
        else:
            pictures = "give smaller pictures, " if smaller else ""
            advice = f"Pruning gains too little here. Run the model unpruned, {pictures}or export it with weights in "
            advice += "int8 or int4."
        return BudgetError(
            f"no budget takes as little as {target.wanted:g} {unit} here: the least is {least:.1f}, unpruned it is "
            f"{unpruned:.0f}. {advice}{note}"
        )

    def _build(self, plan: FoundPlan) -> Combination:
        manifest = self._trials.bundle.manifest
        name, sanitizer = f"found {len(manifest.plans[TRIAL])}", [*self._sanitizers.values()][plan.sanitizer]
        stages = tuple(self._measurements.sizes[size] for size in plan.sizes)
        self._trials.add(
            name, replace(sanitizer, stages=stages), [manifest.cut_after[stage] for stage in plan.stages]
        )
        return Combination(TRIAL, name)

    def _candidate(self, trial: Combination, lost: float, accuracy: float | None, new_tokens: int) -> Candidate:
        planned, manifest = self.times.schedule(trial), self._trials.bundle.manifest
        layers, stages = range(manifest.language_model.num_layers), tuple(planned.plan.cuts) if planned.plan else ()
        return Candidate(
            budget=manifest.budgets[trial.budget],
            stages_after=stages,
            rows=(planned.rows, *(sum(planned.kept[layer]) for layer in stages)),
            mean_visual_tokens=sum(map(planned.reaching, layers)) / len(layers),
            lost=lost,
            accuracy=accuracy,
            predicted_ms=self.times.predict(trial, new_tokens),
        )


def _accuracies(
    pipeline: Pipeline, trials: Sequence[Combination], items: Sequence[Item], progress: OnProgress
) -> dict[str, float]:
    """Return the fraction of right answers to `items` by budget, and unpruned; empty without items."""
    asked, answers, right = count(), len(items) * (1 + len(trials)), dict[str, list[bool]]()
    for reply in collect_replies(
        pipeline, items, trials, on_run=lambda _: progress("comparing budgets", next(asked), answers, "answers")
    ):
        right.setdefault(reply.combination.budget, []).append(reply.right)
    return {name: sum(each) / len(each) for name, each in right.items()}
