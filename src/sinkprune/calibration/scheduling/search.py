"""The plans that a bundle could have: trying them, their prices and losses, and adding one to the bundle."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkprune.calibration.evaluation.replies import Combination
from sinkprune.calibration.questions import PictureQuestion
from sinkprune.contract.budgets import FAMILIES, UNPRUNED, Budget
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import format_value
from sinkprune.contract.errors import BudgetError, BundleError
from sinkprune.contract.files.folders import check_replaceable, naming_full, replacing
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.manifest_file import FileSpec, sha256
from sinkprune.contract.files.trust import Sign, Trust
from sinkprune.contract.manifest import BUNDLE, Manifest, QwenTower
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.contract.report import Spread
from sinkprune.contract.schedule import Schedule, VisualLayout, schedule
from sinkprune.deadlines.costs import Costs, later_tokens, predict
from sinkprune.deadlines.measuring import MeasurementRounds
from sinkprune.deadlines.pipeline import Pipeline
from sinkprune.export.dialects import load_dialect
from sinkprune.export.methods.sinkpruner import build_after
from sinkprune.export.planning import save_plan
from sinkprune.export.pruning.plan import PlanFacts, VariableTokens
from sinkprune.export.weights import PRECISIONS
from sinkprune.runtime.families import load_family
from sinkprune.runtime.steps.request import new_request

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_NEEDED_BYTES = 8 << 20


TRIAL = "trial"
"""The method of trial plans in memory: SinkPruner with other counts."""


class Trials:
    """A bundle whose method `TRIAL` has the plans that are added; its own folder stays unchanged."""

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        own = bundle.manifest
        self._folder, self._files = folder, dict(bundle.files)
        copies: dict[str, Any] = {name: dict(getattr(own, name)) for name in ("budgets", "graphs", "files")}
        manifest = replace(own, plans={**own.plans, TRIAL: {}}, **copies)
        self.facts = plan_facts(manifest)
        self.bundle = Bundle(bundle.path, manifest, bundle.sha256, self._files, bundle.trust)
        """The bundle to load a pipeline from; the pipeline also finds plans that are added later."""

    def add(self, name: str, budget: Budget, cuts: Sequence[int]) -> None:
        """Add SinkPruner's plan of `budget` under `name`, with its stages after the layers `cuts`.

        Raises `BudgetError` for a plan that cannot be built.
        """
        manifest = self.bundle.manifest
        with naming_full(self._folder):
            plan, graphs = save_plan(self._folder, self.facts, TRIAL, name, build_after(self.facts, budget, cuts))
        for spec in graphs.values():
            path = self._folder / spec.file
            self._files[spec.file] = HeldFile(path, lambda reason: BundleError(f"a trial graph {reason}"))
            manifest.files[spec.file] = FileSpec(path.stat().st_size, sha256(path))
        manifest.graphs.update(graphs)
        manifest.budgets[name] = budget
        manifest.plans[TRIAL][name] = plan


def plan_facts(manifest: Manifest) -> PlanFacts:
    """Return the facts of the model from which the export built the bundle's plans."""
    outputs = {tensor.name: tensor.shape for tensor in manifest.graphs["vision"].outputs}
    largest: Sequence[VisualLayout] = [*load_family(manifest).largest().values()]
    groups, in_all = max(one.groups for one in largest), max(one.all_tokens for one in largest)
    tokens: int | VariableTokens = manifest.most_visual_tokens
    if manifest.any_resolution:
        tower = manifest.tower(QwenTower)
        tokens = VariableTokens(manifest.most_visual_tokens, (tower.patch_size * tower.merge_size) ** 2, in_all)
    return PlanFacts(
        language_model=manifest.language_model,
        tokens=tokens,
        visual_width=outputs["tokens"][-1],
        precision=PRECISIONS[manifest.precision],
        dialect=load_dialect(manifest.dialect),
        groups=groups,
        images=manifest.max_images,
        joined=manifest.any_resolution and groups > 1,
        deepstack=manifest.deepstack_width // outputs["tokens"][-1],
    )


METHOD = "sinkpruner"
_NAME = re.compile("[a-z0-9][a-z0-9._-]{0,63}")


def check_name(manifest: Manifest, name: str) -> None:
    """Raise `BudgetError` for a name that a budget of this bundle may not have."""
    if not _NAME.fullmatch(name):
        raise BudgetError(
            f"the name {format_value(name)} cannot be a budget's, expected up to 64 of a-z, 0-9, dots, dashes and "
            "underscores, a letter or digit first. Choose another --name."
        )
    if name == UNPRUNED or name in FAMILIES[manifest.family].budgets:
        raise BudgetError(
            f"'{name}' is the name of a budget that every bundle of family '{manifest.family}' may have, and means "
            "the same in each. Choose another --name."
        )


def check_addable(bundle: Bundle, name: str, *, force: bool, signed: bool) -> None:
    """Check that a budget can be added; raises `BudgetError` for the name, `BundleError` for the bundle.

    `force` allows replacing a budget that was added before; `signed` means that the new manifest will be signed.
    """
    check_name(bundle.manifest, name)
    if name in bundle.manifest.budgets and not force:
        raise BudgetError(
            f"the bundle holds a budget '{name}' already. Add --force to replace it, or choose another --name."
        )
    check_replaceable(bundle.path, BUNDLE, force=True)
    folder = bundle.path.absolute().parent
    if not os.access(folder, os.W_OK) or not os.access(bundle.path, os.W_OK):
        raise BundleError(
            f"'{bundle.path}' cannot be written: no permission, or a read-only file system, at '{folder}'. Copy the "
            "bundle to a place of your own, or add --dry-run to get the report only."
        )
    if not signed and (bundle.path / BUNDLE.signature).exists():
        raise BundleError(
            f"'{bundle.path}' is signed, and its signature will not fit the changed bundle. Give the key "
            f"with --sign KEY, or remove '{BUNDLE.signature}' first."
        )


def add_budget(
    bundle: Bundle, name: str, budget: Budget, cuts: Sequence[int], *, force: bool = False, sign: Sign | None = None
) -> Manifest:
    """Write `budget` into the folder of `bundle` under `name`, with its stages after the layers `cuts`.

    A new folder of hard links to the present files and of the new graphs replaces the old one. After a kill at any
    moment the next command finds the bundle with the budget or without it. Raises what `check_addable` raises, and
    `BundleError` if the bundle changed since it was read or its disk has no hard links.
    """
    check_addable(bundle, name, force=force, signed=sign is not None)
    manifest = bundle.manifest
    former = manifest.plans.get(METHOD, {}).get(name)
    dropped = {graph: manifest.graphs[graph].file for graph in (former.graphs if former else ())}
    files = {file: spec for file, spec in manifest.files.items() if file not in dropped.values()}
    graphs = {graph: spec for graph, spec in manifest.graphs.items() if graph not in dropped}
    with replacing(bundle.path, BUNDLE, _NEEDED_BYTES, "remove a budget", force=True) as new:
        for file in files:
            _link(bundle.path / file, new / file)
        facts = plan_facts(manifest)
        plan, own = save_plan(new, facts, METHOD, name, build_after(facts, budget, cuts))
        for spec in own.values():
            files[spec.file] = FileSpec((new / spec.file).stat().st_size, sha256(new / spec.file))
        added = replace(
            manifest,
            sinkprune_version=version("sinkprune"),
            budgets={**manifest.budgets, name: budget},
            plans={**manifest.plans, METHOD: {**manifest.plans.get(METHOD, {}), name: plan}},
            graphs=graphs | own,
            files=dict(sorted(files.items())),
        )
        BUNDLE.write(new, added, sign)
        BUNDLE.hold(new, added.files)
        # Fail if another process changed the bundle meanwhile.
        BUNDLE.read(bundle.path, Manifest, Trust(bundle.sha256))
    return added


def _link(source: Path, target: Path) -> None:
    """Create a hard link, without reading or writing the file's bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise BundleError(
            f"'{source}' cannot be linked: {error.strerror}. Its disk must support hard links; copy the bundle to "
            "one that does."
        ) from error


MOST_STAGES = 3
"""The stages of the method."""

Price = Callable[[int, Array, tuple[int, ...]], Array]
"""Returns the prices [n] of plans. Arguments: the sanitizer's number, the visual rows [n,S] that reach each segment,
and the numbers of the segments that a stage follows."""


@dataclass(frozen=True)
class LatencyPrice:
    """The time of a request to its last token: `sinkprune.deadlines.costs.predict` for many plans."""

    costs: Costs
    layers: tuple[int, ...]
    """The decoder layers of each segment."""
    text: int
    """Text tokens of the prompt."""
    tokens: int
    """Visual tokens of the picture."""
    projector: bool
    """Whether the model has a projector."""
    new_tokens: int

    def __call__(self, sanitizer: int, rows: Array, stages: tuple[int, ...]) -> Array:
        costs, all_rows = self.costs, self.text + rows
        total = costs.tower.ms(self.tokens) + costs.rest + costs.sanitizer.ms(rows[:, 0])
        if self.projector:
            total = total + costs.projector.ms(rows[:, 0])
        for segment, curve in enumerate(costs.decoders):
            total = total + curve.ms(all_rows[:, segment])
        for stage in stages:
            total = total + costs.select.ms(all_rows[:, stage])
        mean = all_rows @ np.array(self.layers) / sum(self.layers)
        return total + later_tokens(costs.token_start, self.new_tokens - 1) * costs.token.ms(mean)


@dataclass(frozen=True)
class MeanTokensPrice:
    """Visual tokens a decoder layer runs on, mean over layers."""

    layers: tuple[int, ...]

    def __call__(self, sanitizer: int, rows: Array, stages: tuple[int, ...]) -> Array:
        return rows @ np.array(self.layers) / sum(self.layers)


@dataclass(frozen=True)
class PlanSpace:
    """The plans to choose from: A sanitizers, and stages of M sizes after some of the C = S - 1 first segments."""

    layers: tuple[int, ...]
    """[S]: the decoder layers of each segment."""
    kept: Array
    """[A]: visual rows that each sanitizer keeps."""
    sizes: Array
    """[M], ascending: visual rows that a stage may keep."""
    lost_before: Array
    """[A,S]: the share of a segment's text-visual attention on tokens that the sanitizer dropped."""
    lost_after: Array
    """[A,C,S,M]: the same on all dropped tokens, if the last stage before the segment has that place and size."""


class FoundPlan(NamedTuple):
    sanitizer: int
    """Its number in the space."""
    stages: tuple[int, ...]
    """The numbers of the segments that its stages follow."""
    sizes: tuple[int, ...]
    """The numbers of its stages' sizes."""
    price: float
    lost: float
    """The share of text-visual attention that it drops, mean over layers."""


def best_of_each_sanitizer(space: PlanSpace, price: Price, limit: float) -> list[FoundPlan]:
    """Return the plan of each sanitizer with the least loss at a price of at most `limit`, the least loss first.

    Of equal losses the cheaper comes first. A sanitizer without such a plan is left out.
    """
    found = [_best(space, price, limit, sanitizer) for sanitizer in range(len(space.kept))]
    return sorted(filter(None, found), key=lambda plan: (plan.lost, plan.price))


def cheapest(space: PlanSpace, price: Price) -> FoundPlan:
    """Return the plan of the space with the least price; of equal prices the one with the least loss."""
    found = []
    for sanitizer in range(len(space.kept)):
        for stages, chosen, rows in _plans(space, sanitizer):
            prices = price(sanitizer, rows, stages)
            found.append(_plan(sanitizer, stages, chosen, prices, _lost(space, sanitizer, stages, chosen), prices))
    return min(found, key=lambda plan: (plan.price, plan.lost))


def _best(space: PlanSpace, price: Price, limit: float, sanitizer: int) -> FoundPlan | None:
    best = None
    for stages, chosen, rows in _plans(space, sanitizer):
        prices = price(sanitizer, rows, stages)
        lost = np.where(prices <= limit, _lost(space, sanitizer, stages, chosen), np.inf)
        plan = _plan(sanitizer, stages, chosen, prices, lost, lost)
        if np.isfinite(plan.lost) and (best is None or (plan.lost, plan.price) < (best.lost, best.price)):
            best = plan
    return best


def _plan(
    sanitizer: int, stages: tuple[int, ...], chosen: Array, prices: Array, lost: Array, least: Array
) -> FoundPlan:
    """Return the one of n plans with the `least` value; of equal values the cheaper, then the one of less loss."""
    place = int(np.lexsort((lost, prices, least))[0])
    return FoundPlan(sanitizer, stages, tuple(chosen[place].tolist()), float(prices[place]), float(lost[place]))


def _plans(space: PlanSpace, sanitizer: int) -> Iterator[tuple[tuple[int, ...], Array, Array]]:
    """Yield each choice of stages, its descending sizes' numbers [n,stages], and the segments' rows [n,S]."""
    segments, kept = len(space.layers), int(space.kept[sanitizer])
    smaller = range(int(np.searchsorted(space.sizes, kept)))
    for count in range(min(MOST_STAGES, segments - 1) + 1):
        choices = [*combinations(reversed(smaller), count)]
        chosen = np.array(choices, np.int64).reshape(len(choices), count)
        for stages in combinations(range(segments - 1), count) if choices else ():
            rows = np.full((len(chosen), segments), kept)
            for number, stage in enumerate(stages):
                rows[:, stage + 1 :] = space.sizes[chosen[:, number], None]
            yield stages, chosen, rows


def _lost(space: PlanSpace, sanitizer: int, stages: tuple[int, ...], chosen: Array) -> Array:
    """Return [n]: the attention that plans lose, mean over layers."""
    total, last = np.zeros(len(chosen)), None
    for segment, layers in enumerate(space.layers):
        if last is None:
            total += layers * space.lost_before[sanitizer, segment]
        else:
            total += layers * space.lost_after[sanitizer, stages[last], segment, chosen[:, last]]
        if segment in stages:
            last = stages.index(segment)
    return total / sum(space.layers)


UNPRUNED_MODEL = Combination(METHOD, UNPRUNED)


class RequestTimes:
    """The times of a request with the budgets of a pipeline's bundle, in milliseconds to the last new token."""

    def __init__(
        self, pipeline: Pipeline, prompt: PictureQuestion, seconds: float, progress: OnProgress = unreported
    ) -> None:
        self._pipeline, self._prompt, self._seconds, self._progress = pipeline, prompt, seconds, progress
        request = new_request(*prompt, method=METHOD)
        self.costs = pipeline.measure_costs(request, seconds, progress)
        """Medians, at the machine's speed of the last measurement."""
        self.p95_ratio = 1.0
        """The 95th percentile of the last measured times, as a multiple of their median; 1 before the first."""
        self.requests = 0
        """The requests of each combination of the last measured times."""
        self._measured = 0
        self.layout = pipeline.family.layout(prompt.image)
        self.text_tokens = pipeline.prompts.encode(request.texts).text_tokens

    def schedule(self, combination: Combination) -> Schedule:
        return schedule(self._pipeline.bundle.manifest, *combination, [self.layout])

    def price(self, new_tokens: int) -> LatencyPrice:
        """Return the median time of all plans of the bundle's cuts."""
        manifest = self._pipeline.bundle.manifest
        layers, projector = tuple(map(len, manifest.segments)), manifest.projector is not None
        return LatencyPrice(self.costs, layers, self.text_tokens, self.layout.all_tokens, projector, new_tokens)

    def predict(self, combination: Combination, new_tokens: int) -> float:
        manifest = self._pipeline.bundle.manifest
        predicted = predict(self.costs, manifest, self.schedule(combination), self.text_tokens)
        tower_ms: float = self.costs.tower.ms(self.layout.all_tokens)
        return tower_ms + predicted.whole(new_tokens)

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

    def correct(self, measured: Spread, predicted_ms: float) -> None:
        """Scale the costs to the speed at which a request was `measured`, and note how slow the slowest were."""
        self.costs = self.costs.slower(measured.median / predicted_ms)
        self.p95_ratio = measured.p95 / measured.median
