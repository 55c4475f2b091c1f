"""Bundles on the disk: only this module reads `bundle.json`.

Reading validates the format version, every field, the graphs' inputs and outputs (docs/graph-contract.md), and every
file's size, before anything is loaded. `verify` compares every sha256.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkprune.contract.budgets import BARLESS_TOWER, FAMILIES, OTHER_TOWERS, TOWER, Budget, Plan, is_tower
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import recover
from sinkprune.contract.files.manifest_file import Folder
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.files.untrusted import MANIFEST_BYTES
from sinkprune.contract.manifest import (
    BESIDE_GRAPHS,
    BUNDLE,
    BUNDLE_FOLDER,
    ENGINES_MANIFEST,
    MANIFEST,
    Manifest,
    TensorSpec,
)
from sinkprune.contract.precision import DTYPES
from sinkprune.contract.progress import OnProgress, unreported

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Engines


@dataclass(frozen=True)
class Bundle(Folder[Manifest]):
    """A bundle that was read: its place, its manifest, and its files, held open."""

    kind = BUNDLE
    engines: Engines | None = None
    """The engines that run instead of graphs, if the bundle is part of a folder of engines; else None."""

    def verify(self, progress: OnProgress = unreported) -> None:
        """Compare every file with its sha256.

        For a bundle in a folder of engines, these are the files of the engines. Raises `BundleError`, `EnginesError`.
        """
        if self.engines is None:
            super().verify(progress)
        else:
            self.engines.verify(progress)


def read_bundle(path: str | os.PathLike[str], trust: Trust = ANY, *, whole: bool = True) -> Bundle:
    """Return the bundle at `path`: its manifest validated, and every file of its size and held open.

    Files may be missing unless the bundle must be `whole`: `sinkprune-build --move` removes them one by one.
    `Bundle.verify` compares the sums. Raises `BundleError`, also for a manifest other than `trust` expects, and for a
    folder of engines, which holds no graphs.
    """
    root = Path(path)
    recover(root, BUNDLE)
    if os.path.lexists(root / ENGINES_MANIFEST):
        raise BundleError(
            f"'{root}' is a folder of engines, and this needs the bundle that they were built from. Give that one."
        )
    manifest, sha256 = BUNDLE.read(root, Manifest, trust)
    _check_consistent(root / MANIFEST, manifest)
    return Bundle(root, manifest, sha256, BUNDLE.hold(root, manifest.files, whole=whole), trust)


def read_runnable(path: str | os.PathLike[str], trust: Trust = ANY) -> Bundle:
    """Return the bundle at `path`, or the bundle in the folder of engines at `path`.

    `trust` applies to the folder's own manifest, `bundle.json` or `engines.json`. Raises `BundleError` and
    `EnginesError`, as `read_bundle` and `read_engines` do.
    """
    root = Path(path)
    if os.path.lexists(root) and not os.path.lexists(root / ENGINES_MANIFEST):
        return read_bundle(root, trust)
    from sinkprune.contract.engines_manifest import ENGINES, read_engines

    recover(root, ENGINES)
    if not os.path.lexists(root / ENGINES_MANIFEST):
        return read_bundle(root, trust)
    return _came_with(read_engines(root, trust))


def _came_with(engines: Engines) -> Bundle:
    """Return the bundle in a folder of engines: manifest, tokenizer, chat template and embedding, without graphs."""
    root, kind = engines.path / BUNDLE_FOLDER, engines.kind
    prefix = f"{BUNDLE_FOLDER}/"
    files = {name.removeprefix(prefix): file for name, file in engines.files.items() if name.startswith(prefix)}
    lacking = [name for name in (MANIFEST, *BESIDE_GRAPHS) if name not in files]
    if lacking:
        raise kind.error(f"the engines '{engines.path}' came without '{lacking[0]}' of a bundle. {kind.again}")
    data = files.pop(MANIFEST).read(MANIFEST_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != engines.manifest.bundle_sha256:
        raise kind.error(
            f"'{root / MANIFEST}' has the sha256 {sha256}, but the engines next to it were built from a bundle of "
            f"{engines.manifest.bundle_sha256}. {kind.again}"
        )
    manifest = BUNDLE.parsed(root / MANIFEST, data, Manifest)
    _check_consistent(root / MANIFEST, manifest)
    return Bundle(engines.path, manifest, sha256, files, engines.trust, engines)


def _check_consistent(path: Path, manifest: Manifest) -> None:
    """Reject a manifest of an unknown family, or whose parts contradict each other."""
    if manifest.family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BundleError(f"'{path}' is of family '{manifest.family}', expected one of: {known}. {BUNDLE.upgrade}")
    BUNDLE.check_consistent(path, _complaints(manifest))


def _complaints(manifest: Manifest) -> Iterator[str]:
    """Yield each contradiction in a manifest. Read the first only, because later checks rely on earlier ones."""
    lm = manifest.language_model
    if lm.rope_sections and sum(lm.rope_sections) != lm.head_dim // 2:
        sections, half = list(lm.rope_sections), lm.head_dim // 2
        yield f"has the rope_sections {sections}, expected numbers that add up to {half}, half of head_dim"
    decoders = (f"decoder_{segment}" for segment in range(len(manifest.segments)))
    plans = [(name, plan) for budgets in manifest.plans.values() for name, plan in budgets.items()]
    projector = [] if manifest.projector is None else [manifest.projector]
    selections = [graph for _, plan in plans for graph in plan.graphs]
    towers = [TOWER, *(plan.tower for _, plan in plans if plan.tower is not None)]
    if not all(map(is_tower, towers)):
        yield f"runs the vision towers {', '.join(towers)}, expected {' or '.join((TOWER, *OTHER_TOWERS.values()))}"
    used = dict.fromkeys([*towers, *projector, *decoders, manifest.last_graph, *manifest.policy_graphs, *selections])
    for graph in used:
        if graph not in manifest.graphs:
            yield f"lacks the graph '{graph}'"
    for name, plan in plans:
        yield from _complaints_of_plan(manifest, f"holds a plan at budget '{name}' that", plan)
    for file in (*BESIDE_GRAPHS, *(graph.file for graph in manifest.graphs.values())):
        if file not in manifest.files:
            yield f"has no size and sha256 for '{file}'"
    yield from _contract_violations(manifest)
    if manifest.deepstack_width == 0 and any(t.name == "deepstack" for t in manifest.graphs["vision"].outputs):
        yield "has a graph 'vision' that gives 'deepstack', which graph 'decoder_0' does not take"
    for graph in manifest.graphs:
        if graph not in used:
            yield f"holds the graph '{graph}', which nothing runs"


def _complaints_of_plan(manifest: Manifest, what: str, plan: Plan) -> Iterator[str]:
    has_shares = manifest.any_resolution or plan.tower == BARLESS_TOWER
    kept, other = (plan.shares, plan.counts) if has_shares else (plan.counts, plan.shares)
    if kept is None or other is not None:
        yield f"{what} must have {'shares and no counts' if has_shares else 'counts and no shares'}"
        return
    chooses = kept.sanitizer if isinstance(kept, Budget) else kept.kept != manifest.tokens_of(plan)
    if chooses and plan.sanitizer is None:
        yield f"{what} keeps some of the tokens, and no sanitizer to choose them"
    cuts = [str(layer) for layer in sorted(manifest.cut_after)]
    if not set(cuts).issuperset(plan.select_after) or len(plan.select_after) != len(kept.stages):
        yield (
            f"{what} selects after layers {', '.join(plan.select_after)} with {len(kept.stages)} counts; the decoder "
            f"is cut after {', '.join(cuts)}"
        )


def _contract_violations(manifest: Manifest) -> Iterator[str]:
    """Yield a message for each missing or different output, and for each input that nothing provides."""
    for graph, given, needed in Interfaces(manifest).of_all_graphs():
        spec = manifest.graphs[graph]
        outputs = {tensor.name: tensor for tensor in spec.outputs}
        # Needed tensors come one by one, so an absurd number of layers fails at its first missing tensor.
        for expected in needed:
            yield from _misfit(graph, "output", outputs.get(expected.name), expected)
        inputs = {tensor.name: tensor for tensor in given}
        for declared in spec.inputs:
            yield from _misfit(graph, "input", declared, inputs.get(declared.name))


def _misfit(graph: str, role: str, found: TensorSpec | None, expected: TensorSpec | None) -> Iterator[str]:
    if found and expected and found.dtype == expected.dtype and len(found.shape) == len(expected.shape):
        sizes = zip(found.shape, expected.shape, strict=True)
        if all(wanted is None or size == wanted for size, wanted in sizes):
            return
    words = [f"{spec.name} {spec.dtype}{list(spec.shape)}" if spec else "none" for spec in (found, expected)]
    yield (
        f"has a graph '{graph}' that does not fit the model's facts and cuts: its {role} is {words[0]}, expected "
        f"{words[1]}"
    )


Interface = tuple[str, Iterable[TensorSpec], Iterable[TensorSpec]]
"""A graph, its available inputs and its required outputs."""


class Interfaces:
    """The interfaces that a manifest's facts require of its graphs; a size of None is any size."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._lm = manifest, manifest.language_model
        vision = {tensor.name: tensor.shape for tensor in manifest.graphs["vision"].outputs}
        self._tokens, self._width = vision["tokens"][1:] if len(vision.get("tokens", ())) == 3 else (None, None)
        self._deepstack_width = vision["deepstack"][-1] if "deepstack" in vision else None
        self._query, self._key = self.heads("query", self._lm.num_heads), self.heads("key", self._lm.num_kv_heads)

    def of_all_graphs(self) -> Iterator[Interface]:
        """Yield the interface of each graph.

        The inputs of `vision` depend on the family: the runtime checks them when it loads the family.
        """
        manifest, lm = self._manifest, self._lm
        yield TOWER, manifest.graphs[TOWER].inputs, self._features(self._tokens)
        towers = {plan.tower: plan for plans in manifest.plans.values() for plan in plans.values() if plan.tower}
        for tower, plan in towers.items():
            takes, gives = [*manifest.graphs[TOWER].inputs], self._features(self._tokens_of(plan))
            if tower == BARLESS_TOWER:
                takes.append(TensorSpec("places", "int64", (None, None)))
            else:
                gives.append(TensorSpec("merged", "int64", (None, self._tokens)))
            yield tower, takes, gives
        if manifest.projector:
            embeddings = self.floats("embeddings", None, None, lm.hidden_size)
            yield manifest.projector, [self.floats("tokens", None, None, self._width)], [embeddings]
        for number, layers in enumerate(manifest.segments):
            yield f"decoder_{number}", *self._decoder(number, layers)
        policy = manifest.policy
        if manifest.decodes or policy is None:
            yield "head", self.rows()[:1], [self.floats("logits", 1, lm.vocab_size)]
        else:
            from sinkprune.contract.policy_interfaces import policy_interfaces

            yield from policy_interfaces(manifest, policy, self)
        for plans in manifest.plans.values():
            for plan in plans.values():
                yield from self._of_plan(plan)

    def _decoder(self, number: int, layers: range) -> tuple[Iterable[TensorSpec], Iterable[TensorSpec]]:
        """Return the inputs and outputs of a segment, one by one: an absurd number of layers takes no memory."""
        is_last = layers.stop == self._lm.num_layers
        gives = [] if self._manifest.reads_caches and is_last else self.rows("_out")[:1]
        gives += [] if is_last else [self._query, self._key]
        takes = [*self.rows(), *(self._deepstack("deepstack", 1, None) if number == 0 else [])]
        takes.append(TensorSpec("past_length", "int64", (1,)))
        # The name of the output's size identifies the form of cache.
        given = {"in-place": "C", "rows": "S"}[self._manifest.cache]
        return chain(takes, self._caches("past_", layers, "C")), chain(gives, self._caches("", layers, given))

    def _of_plan(self, plan: Plan) -> Iterator[Interface]:
        """Yield the interfaces of the graphs of a plan."""
        width, tokens = self._lm.hidden_size, self._tokens_of(plan)
        features = self._features(tokens)
        if plan.sanitizer:
            kept = plan.counts.kept if plan.counts else None
            # For sanitizers that read the question: all tokens, and its words, as the decoder receives them.
            read = [self.floats("embeddings", None, tokens, width), self.floats("question", None, width)]
            chosen = [
                self.floats("kept_tokens", None, kept, self._width),
                TensorSpec("kept_index", "int64", (None, kept)),
                *self._deepstack("kept_deepstack", None, kept),
            ]
            yield plan.sanitizer, [*features, *read], chosen
        indices = _index("visual_index", "text_index", "visual_group", "quota")
        given = [*self.rows(), self._query, self._key, *indices, *features[1:2]]
        left = [*self.rows("_out"), *_index("visual_index_out", "text_index_out", "keep_index")]
        for graph in plan.select_after.values():
            yield graph, given, left

    def _tokens_of(self, plan: Plan) -> Any:
        if plan.tower == BARLESS_TOWER:
            return None
        return self._manifest.tokens_of(plan) if plan.tower else self._tokens

    def _features(self, tokens: Any) -> list[TensorSpec]:
        """Return the outputs of a tower that gives so many tokens of each group."""
        # Without a projector the tower's tokens are the decoder's rows.
        width = self._width if self._manifest.projector else self._lm.hidden_size
        values = [TensorSpec(name, "float32", (None, tokens)) for name in ("norms", "salience")]
        # The sanitizer selects DeepStack's features with the tokens, and the first segment adds them to the rows.
        return [self.floats("tokens", None, tokens, width), *values, *self._deepstack("deepstack", None, tokens)]

    def floats(self, name: str, *shape: Any) -> TensorSpec:
        return TensorSpec(name, DTYPES[self._manifest.precision].name, shape)  # type: ignore[arg-type]

    def rows(self, suffix: str = "") -> list[TensorSpec]:
        tables = [self.floats(f"{table}{suffix}", 1, None, self._lm.head_dim // 2) for table in ("cos", "sin")]
        return [self.floats(f"hidden{suffix}", 1, None, self._lm.hidden_size), *tables]

    def _deepstack(self, name: str, *shape: Any) -> list[TensorSpec]:
        return [self.floats(name, *shape, self._deepstack_width)] if self._deepstack_width else []

    def heads(self, name: str, count: int, rows: Any = None) -> TensorSpec:
        return self.floats(name, 1, count, rows, self._lm.head_dim)

    def _caches(self, prefix: str, layers: range, rows: Any) -> Iterator[TensorSpec]:
        for layer in layers:
            yield self.heads(f"{prefix}key_{layer}", self._lm.num_kv_heads, rows)
            yield self.heads(f"{prefix}value_{layer}", self._lm.num_kv_heads, rows)


def _index(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, "int64", (None,)) for name in names]
