"""The plans that a bundle could have: trying them, their prices and losses, and adding one to the bundle."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain, combinations
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from sinkprune.contract.schedule import VisualLayout
from sinkprune.deadlines.costs import Costs, later_tokens
from sinkprune.export.dialects import load_dialect
from sinkprune.export.methods.sinkpruner import build_after
from sinkprune.export.planning import save_plan
from sinkprune.export.pruning.plan import PlanFacts, VariableTokens
from sinkprune.export.weights import PRECISIONS
from sinkprune.runtime.families import load_family

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
"""As many as the paper's."""

Price = Callable[[Array, tuple[int, ...]], Array]
"""Returns the prices [n] of plans. Arguments: the visual rows [n,S] that reach each segment, and the numbers of the
segments that a stage follows."""


def latency_price(
    costs: Costs, layers: Sequence[int], *, text: int, tokens: int, projector: bool, new_tokens: int
) -> Price:
    """Return the time of a request to its last token: `sinkprune.deadlines.costs.predict` for many plans.

    `layers` are the decoder layers of each segment, `text` the text tokens of the prompt, `tokens` the visual tokens
    of the picture.
    """

    def price(rows: Array, stages: tuple[int, ...]) -> Array:
        all_rows = text + rows
        total = costs.tower.ms(tokens) + costs.rest + costs.sanitizer.ms(rows[:, 0])
        if projector:
            total = total + costs.projector.ms(rows[:, 0])
        for segment, curve in enumerate(costs.decoders):
            total = total + curve.ms(all_rows[:, segment])
        for stage in stages:
            total = total + costs.select.ms(all_rows[:, stage])
        mean = all_rows @ np.array(layers) / sum(layers)
        return total + later_tokens(costs.token_start, new_tokens - 1) * costs.token.ms(mean)

    return price


def mean_tokens_price(layers: Sequence[int]) -> Price:
    """Return the visual tokens that a decoder layer runs on, mean over the `layers` of each segment."""
    return lambda rows, stages: rows @ np.array(layers) / sum(layers)


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


def best_of_each_sanitizer(
    space: PlanSpace, price: Price, limit: float = math.inf, by: tuple[str, str] = ("lost", "price")
) -> list[FoundPlan]:
    """Return the best plan of each sanitizer at a price of at most `limit`, the best first.

    The best plan has the least of the first figure of `by`, and then the least of the second. A sanitizer without a
    plan at that price is left out.
    """
    every = (_plans(space, price, sanitizer, by, limit) for sanitizer in range(len(space.kept)))
    best = (sorted(plans, key=attrgetter(*by))[:1] for plans in every)
    return sorted(chain.from_iterable(best), key=attrgetter(*by))


def _plans(space: PlanSpace, price: Price, sanitizer: int, by: tuple[str, str], limit: float) -> Iterator[FoundPlan]:
    segments, kept = len(space.layers), int(space.kept[sanitizer])
    smaller = range(int(np.searchsorted(space.sizes, kept)))
    for count in range(min(MOST_STAGES, segments - 1) + 1):
        # Sizes descend from stage to stage.
        choices = [*combinations(reversed(smaller), count)]
        chosen = np.array(choices, np.int64).reshape(len(choices), count)
        for stages in combinations(range(segments - 1), count) if choices else ():
            rows = np.full((len(chosen), segments), kept)
            for number, stage in enumerate(stages):
                rows[:, stage + 1 :] = space.sizes[chosen[:, number], None]
            found = {"price": price(rows, stages), "lost": _lost(space, sanitizer, stages, chosen)}
            first, second = (found[name] for name in by)
            order = np.lexsort((second, first))
            for place in order[found["price"][order] <= limit][:1]:
                figures = {name: float(values[place]) for name, values in found.items()}
                yield FoundPlan(sanitizer, stages, tuple(chosen[place].tolist()), **figures)


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
