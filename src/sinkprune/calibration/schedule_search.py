"""Proposes budgets: where layers can drop visual tokens, how many, and what attention of the text that loses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.calibration.attention import received_by_head
from sinkprune.calibration.evaluation.replies import Combination, collect_replies
from sinkprune.calibration.plans import (
    METHOD,
    TRIAL,
    FoundPlan,
    PlanSpace,
    Price,
    Trials,
    best_of_each_sanitizer,
    latency_price,
    mean_tokens_price,
)
from sinkprune.calibration.questions import PictureQuestion
from sinkprune.calibration.tasks import Item
from sinkprune.contract.budgets import FAMILIES, UNPRUNED, Budget, Share
from sinkprune.contract.errors import BudgetError, NumericsError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress
from sinkprune.contract.report import FEWEST_OF_P95, Spread
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.deadlines.costs import Costs, predict
from sinkprune.deadlines.measuring import MeasurementRounds
from sinkprune.deadlines.pipeline import Pipeline
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.profiling.other_load import LOADED
from sinkprune.runtime.steps.chain import encode, run_tower
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.steps.request import new_request

UNPRUNED_MODEL = Combination(METHOD, UNPRUNED)

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
    tables = rows.rotary_tables(backend, chain.rotary)
    hidden, added = rows.hidden, rows.deepstack_inputs
    for decoder in chain.decoders[:-1]:
        outputs = decoder({"hidden": hidden, **tables, **added}, decoder.new_cache())
        # DeepStack's rows are inputs of the first segment only.
        hidden, added = outputs["hidden_out"], {}
        query, key = (backend.numpy(outputs[name]) for name in ("query", "key"))
        attention = received_by_head(query, key, rows, both_ways=manifest.both_ways).mean(axis=0)
        tokens = np.zeros(layout.all_tokens)
        np.add.at(tokens, source[source >= 0], attention[source >= 0])
        received.append(tokens)
    if not np.isfinite(received).all() or not np.sum(received, axis=1).all():
        raise NumericsError("the text's attention to the picture is zero or not finite: it cannot choose a budget.")
    return PictureAttention(np.stack(received), kept)


def dropped_attention(attended: Sequence[PictureAttention], sizes: Sequence[Share]) -> tuple[Array, Array]:
    """Return `lost_before` [A,S] and `lost_after` [A,C,S,M] of `PlanSpace`: dropped attention, mean over pictures.

    The attention before a cut stands for the segment that ends there, and ranks the tokens of a stage after it. That
    of the last cut stands for the last segment too.
    """
    cuts, sanitizers = len(attended[0].received), len(attended[0].kept)
    before, after = np.zeros((sanitizers, cuts + 1)), np.zeros((sanitizers, cuts, cuts + 1, len(sizes)))
    for one in attended:
        share = one.received / one.received.sum(axis=1, keepdims=True)
        seen = share[[*range(cuts), cuts - 1]]
        counts = np.array([size.of(share.shape[1]) for size in sizes])
        for number, kept in enumerate(one.kept):
            before[number] += 1 - seen[:, kept].sum(axis=1)
            for cut in range(cuts):
                # A stage breaks ties in favour of the earlier token.
                ranked = kept[np.argsort(-share[cut, kept], kind="stable")]
                left = np.cumsum(seen[:, ranked], axis=1)
                after[number, cut] += 1 - left[:, np.minimum(counts, len(ranked)) - 1]
    return before / len(attended), after / len(attended)


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
    """Proposes budgets for a bundle on this machine, from measurements that it makes when it is created.

    Times are milliseconds of a request to its last new token.
    """

    def __init__(
        self,
        trials: Trials,
        pipeline: Pipeline,
        prompts: Sequence[PictureQuestion],
        seconds: float,
        progress: OnProgress,
    ) -> None:
        """Measure the costs of the first prompt for some `seconds`, and the attention of all prompts.

        Raises `BudgetError` for a bundle without the method, and what a request raises.
        """
        self._trials, self._pipeline = trials, pipeline
        self._prompt, self._seconds, self._progress = prompts[0], seconds, progress
        self._manifest = manifest = trials.bundle.manifest
        if not manifest.plans.get(METHOD):
            raise BudgetError(
                f"this bundle holds no budget of method '{METHOD}', so it may be cut where nothing is to be dropped. "
                f"Export it again with --methods {METHOD}."
            )
        request = new_request(*self._prompt, method=METHOD)
        self.costs = pipeline.measure_costs(request, seconds, progress)
        """Medians, at the machine's speed of the last measurement."""
        self._p95_ratio = 1.0
        """The 95th percentile of the last measured times, as a multiple of their median; 1 before the first."""
        self.requests = 0
        """The requests of each combination of the last measured times."""
        self._measured = 0
        self.layout = pipeline.family.layout(self._prompt.image)
        self.text_tokens = pipeline.prompts.encode(request.texts).text_tokens
        self._sanitizers = {f"keep {number}": budget for number, budget in enumerate(sanitizers(manifest))}
        for name, budget in self._sanitizers.items():
            trials.add(name, budget, ())
        self._attended = list[PictureAttention]()
        for number, prompt in enumerate(prompts):
            progress("measuring attention", number, len(prompts), "pictures")
            self._attended.append(measure_attention(pipeline, *prompt, [*self._sanitizers]))
        self._sizes = sizes(manifest)
        self._space = PlanSpace(
            tuple(map(len, manifest.segments)),
            np.array([self.schedule(Combination(TRIAL, name)).rows for name in self._sanitizers]),
            np.array([size.of(self.layout.all_tokens) for size in self._sizes]),
            *dropped_attention(self._attended, self._sizes),
        )
        # Predicted times as shares of the unpruned model's, which corrections of the costs leave as they are.
        self._largest_met, self._least_missed = 0.0, math.inf
        self.nearest: float | None = None
        """The nearest target that a budget may meet, once `propose` has rejected one and pruning gains enough."""

    def propose(self, name: str, target: BudgetTarget, items: Sequence[Item]) -> ScheduleReport:
        """Return the budget that meets the target and drops the least attention, or answers most of `items` if any.

        A target in milliseconds is met if 95 of 100 measured requests take no longer. While a budget leaves much of
        the time, larger ones are tried: by the corrected costs, or between the largest that met the target and the
        smallest that missed it. The best that met it is reported. Raises `BudgetError` if the unpruned model meets
        the target, or if no budget did, not even the cheapest.
        """
        if target.ms is not None and (predicted := self.predict(UNPRUNED_MODEL, target.new_tokens)) <= target.ms:
            [measured] = self.measure([UNPRUNED_MODEL], target.new_tokens)
            # The predictions are corrected by it.
            self._correct(measured, predicted)
            target.check_unmet(measured.p95, _OF_REQUESTS, self._note_on_requests())
        best, misses, searches = None, list[ScheduleReport](), 0
        while len(misses) < _CHEAPEST_TRIES:
            plans = self._find_plans(target, _CANDIDATES if items else 1) if searches < _SEARCHES else []
            if best and (
                target.ms is None
                or not plans
                or best.measured_ms.p95 >= _FULL * target.ms
                or plans[0].lost >= best.chosen.lost - _WORTH
            ):
                break
            latest = self._try_plans(name, target, plans or [self._cheapest(target)], items)
            searches += 1
            share = latest.chosen.predicted_ms / latest.unpruned_ms
            if target.ms is None or latest.measured_ms.p95 <= target.ms:
                self._largest_met = max(self._largest_met, share)
                best = max(filter(None, [best, latest]), key=lambda report: _rank(report.chosen))
            else:
                self._least_missed = min(self._least_missed, share)
                misses += [] if plans else [latest]
            self._correct(latest.measured_ms, latest.chosen.predicted_ms)
        if best is None:
            # By the rule that accepts a budget: the measured 95th percentile.
            slowest = max(misses, key=lambda miss: miss.measured_ms.p95)
            times = slowest.measured_ms.p95, slowest.unpruned_measured_ms.p95
            raise self._unreachable(target, _OF_REQUESTS, *times, self._note_on_requests())
        if target.ms is not None:
            # Where the machine was slower while the costs were measured.
            target.check_unmet(best.unpruned_measured_ms.p95, _OF_REQUESTS, self._note_on_requests())
        return replace(best, searches=searches)

    def schedule(self, combination: Combination) -> Schedule:
        """Return the schedule of the measured picture."""
        return schedule(self._manifest, *combination, [self.layout])

    def measure(self, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        """Return the measured times of each combination; the combinations take turns in each round."""
        latencies = [list[float]() for _ in combinations]
        # A name of its own: what follows counts its rounds anew.
        self._measured += 1
        what = f"measuring budgets, try {self._measured}" if self._measured > 1 else "measuring budgets"
        rounds = MeasurementRounds(what, self._seconds, len(combinations), self._progress)
        for counted in rounds:
            for (method, budget), own in zip(combinations, latencies, strict=True):
                answer = self._pipeline.generate(
                    *self._prompt, method=method, budget=budget, max_new_tokens=new_tokens, min_new_tokens=new_tokens
                )
                rounds.complete_part()
                if counted:
                    own.append(answer.ms["latency"] or 0.0)
        self.requests = len(latencies[0])
        return [Spread.of(own) for own in latencies]

    def predict(self, combination: Combination, new_tokens: int) -> float:
        """Return the predicted median time of a request."""
        predicted = predict(self.costs, self._manifest, self.schedule(combination), self.text_tokens)
        tower_ms: float = self.costs.tower.ms(self.layout.all_tokens)
        return tower_ms + predicted.whole(new_tokens)

    def _correct(self, measured: Spread, predicted_ms: float) -> None:
        """Scale the costs to the speed at which a request was `measured`, and note how slow the slowest were."""
        self.costs = self.costs.slower(measured.median / predicted_ms)
        self._p95_ratio = measured.p95 / measured.median

    def _note_on_requests(self) -> str:
        """Return sentences, each after a space, on what makes the last measured times uncertain, if anything."""
        few, load = few_requests(self.requests), self.costs.load or 0.0
        note = f" {few}." if few else ""
        if load > LOADED:
            hint = self.costs.place.thread_hint
            note += f" Other programs took {100 * load:.0f} % of the processors meanwhile.{hint}"
        return note

    def _find_plans(self, target: BudgetTarget, most: int) -> list[FoundPlan]:
        """Return up to `most` best plans that are predicted to meet the target.

        Raises `BudgetError` if no plan has as few tokens as the target.
        """
        plans = best_of_each_sanitizer(self._space, self._price(target), self._limit(target))[:most]
        if not plans and target.ms is None:
            least = self._cheapest(target).price
            raise self._unreachable(target, TOKENS_A_LAYER, least, self.layout.all_tokens)
        return plans

    def _cheapest(self, target: BudgetTarget) -> FoundPlan:
        return best_of_each_sanitizer(self._space, self._price(target), by=("price", "lost"))[0]

    def _price(self, target: BudgetTarget) -> Price:
        if target.ms is None:
            return mean_tokens_price(self._space.layers)
        return latency_price(
            self.costs,
            self._space.layers,
            text=self.text_tokens,
            tokens=self.layout.all_tokens,
            projector=self._manifest.projector is not None,
            new_tokens=target.new_tokens,
        )

    def _limit(self, target: BudgetTarget) -> float:
        if target.ms is None:
            return target.wanted
        limit, unpruned = target.ms / self._p95_ratio, self.predict(UNPRUNED_MODEL, target.new_tokens)
        low, high = self._largest_met, self._least_missed
        if 0 < low < high < math.inf and not low < limit / unpruned < high:
            # One of the measurements was disturbed.
            limit = unpruned * (low + high) / 2
        return limit

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
        best = max(trials, key=lambda trial: _rank(candidates[trial]))
        measured, unpruned = self.measure([best, UNPRUNED_MODEL], target.new_tokens)
        return ScheduleReport(
            name=name,
            pictures=len(self._attended),
            visual_tokens=self.layout.all_tokens,
            prompt_tokens=self.text_tokens,
            new_tokens=target.new_tokens,
            costs=self.costs,
            unpruned_ms=self.predict(UNPRUNED_MODEL, target.new_tokens),
            questions=len(items),
            unpruned_accuracy=accuracies.get(UNPRUNED),
            chosen=candidates.pop(best),
            others=tuple(candidates.values()),
            measured_ms=measured,
            unpruned_measured_ms=unpruned,
            requests=self.requests,
        )

    def _unreachable(
        self, target: BudgetTarget, unit: str, least: float, unpruned: float, note: str = ""
    ) -> BudgetError:
        """Return the error for a target that no budget meets, the `least` of any and a `note`; sets `nearest`."""
        # Numbers of tokens are exact; times are not, and have a tenth to spare.
        nearest = math.ceil(10 * least) / 10 if target.ms is None else math.ceil(1.1 * least)
        self.nearest = nearest if unpruned > nearest else None
        # Other models have as many tokens of every picture, and weights change times only.
        smaller = self._manifest.any_resolution
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
        name, sanitizer = f"found {len(self._manifest.plans[TRIAL])}", [*self._sanitizers.values()][plan.sanitizer]
        budget = replace(sanitizer, stages=tuple(self._sizes[size] for size in plan.sizes))
        self._trials.add(name, budget, [self._manifest.cut_after[stage] for stage in plan.stages])
        return Combination(TRIAL, name)

    def _candidate(self, trial: Combination, lost: float, accuracy: float | None, new_tokens: int) -> Candidate:
        planned, layers = self.schedule(trial), range(self._manifest.language_model.num_layers)
        stages = tuple(planned.plan.cuts) if planned.plan else ()
        return Candidate(
            budget=self._manifest.budgets[trial.budget],
            stages_after=stages,
            rows=(planned.rows, *(sum(planned.kept[layer]) for layer in stages)),
            mean_visual_tokens=sum(map(planned.reaching, layers)) / len(layers),
            lost=lost,
            accuracy=accuracy,
            predicted_ms=self.predict(trial, new_tokens),
        )


def _rank(candidate: Candidate) -> tuple[float, float]:
    """Return the key of the best candidate: most right answers, then the least dropped attention."""
    return candidate.accuracy or 0.0, -candidate.lost


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


_MOST_LOST = 0.85
"""The share of attention above which a budget causes a warning."""


def report_text(report: ScheduleReport) -> str:
    what = "first token" if report.new_tokens == 1 else f"{report.new_tokens} new tokens"
    none, chosen = (
        f"predicted {_ms(predicted)}, measured {_ms(measured.median)} (p95 {_ms(measured.p95)})"
        for predicted, measured in (
            (report.unpruned_ms, report.unpruned_measured_ms),
            (report.chosen.predicted_ms, report.measured_ms),
        )
    )
    lines = [
        f"{report.visual_tokens} visual tokens and {report.prompt_tokens} of text, to the {what}",
        f"none: {none}{_rated(report.unpruned_accuracy, report.questions)}",
        f"{report.name}: {chosen}; the prediction is {100 * abs(report.off):.1f} % too "
        f"{'low' if report.off < 0 else 'high'}",
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
    layers = f"layer{'s' if len(left) > 1 else ''} {', '.join(map(str, candidate.stages_after))}"
    stages = f", {', '.join(map(str, left))} after {layers}" if left else ""
    return (
        f"{first} tokens into the LLM{stages}; mean {candidate.mean_visual_tokens:.1f} a layer; drops "
        f"{100 * candidate.lost:.1f} % of the text's attention{_rated(candidate.accuracy, questions)}"
    )


def _rated(accuracy: float | None, questions: int) -> str:
    return "" if accuracy is None else f", {accuracy * questions:.0f} of {questions} answers right"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


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
