"""Bundles and engines on the disk: only this module reads and writes `bundle.json` and `engines.json`.

Reading validates the format version, every field, the graphs' inputs and outputs, and every file's size, before
anything is loaded. `verify` compares every sha256.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from sinkprune.contract.budgets import BARLESS_TOWER, FAMILIES, OTHER_TOWERS, TOWER, Budget, Plan, is_tower
from sinkprune.contract.checks import Bounds, Count, Few, Size
from sinkprune.contract.errors import BundleError, EnginesError
from sinkprune.contract.files.folders import recover
from sinkprune.contract.files.manifest_file import FileSpec, Folder, ManifestFile
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.files.untrusted import MANIFEST_BYTES
from sinkprune.contract.graph_contract import contract_violations
from sinkprune.contract.manifest import BESIDE_GRAPHS, BUNDLE, MANIFEST, Manifest
from sinkprune.contract.progress import OnProgress, unreported

FORMAT_VERSION = 4
ENGINES_MANIFEST = "engines.json"
BUNDLE_FOLDER = "bundle"
"""The subfolder of engines with a bundle's files other than graphs, so that the engines run without the bundle."""

Target = Literal["onnxruntime", "onnxruntime+openvino", "openvino", "tensorrt", "tensorrt-rtx"]
"""The libraries that build and run the engines."""
ANY_SHAPE: tuple[Target, ...] = ("onnxruntime", "onnxruntime+openvino", "openvino")
"""The targets whose engines take any shape: no optimisation profiles, and only the limits that the user gave."""
ASKED_LIMITS = "limits"
"""The flag that names the limits a user gave to `sinkprune-build`, with a space between: the fields of `Limits`.

Engines that take any shape enforce these limits only."""
Realisation = Literal["plugin", "function", "stripped"]
"""How an engine computes a `TopRho` or `DiversitySelect` node: by our plugin; by the compiled function body; or by
our plugin after the function body was stripped, because functions take precedence before TensorRT 10.7."""


@dataclass(frozen=True)
class Range:
    """The smallest, usual and largest shape of one input within an optimisation profile, in elements."""

    min: tuple[Count, ...]
    opt: tuple[Count, ...]
    max: tuple[Count, ...]


OptimisationProfile = dict[str, Range]
"""The shapes of one optimisation profile of a TensorRT engine, by the input's name."""
OptimisationProfiles = dict[str, OptimisationProfile]
"""The optimisation profiles of one engine by name, in the engine's order; empty if it takes any shape."""


@dataclass(frozen=True)
class Limits:
    """The largest request that engines are built for."""

    prompt_tokens: Size
    """Text tokens of a rendered prompt (`sinkprune-build --max-prompt`)."""
    new_tokens: Count
    """Generated tokens of an answer (`sinkprune-build --max-new-tokens`); 0 for a policy, which generates none."""
    images: Few
    """Images of a prompt (`sinkprune-build --max-images`): all cameras of a policy."""


LIMIT_OPTIONS = {"prompt_tokens": "--max-prompt", "new_tokens": "--max-new-tokens", "images": "--max-images"}
"""The options of `sinkprune-build`, by the field of `Limits`."""
CHECKED = "checked"
"""The flag of engines that passed the gate."""
MOST_TOKENS = 1 << 30
"""The largest limit of tokens that `Limits` holds; no model has so many positions, so it limits no request."""


def enforced_limits(limits: Limits, target: Target, asked: Container[str]) -> dict[str, int]:
    """Return those of `limits` that engines for `target` enforce, by the field of `Limits`; 0 is no limit.

    `asked` are the fields that the user gave.
    """
    return {
        name: value for name, value in vars(limits).items() if value and (target not in ANY_SHAPE or name in asked)
    }


@dataclass(frozen=True)
class EngineSpec:
    """The engine built of one graph, as `engines.json` lists it."""

    file: str
    """The engine's file, relative to the folder of engines."""
    optimisation_profiles: OptimisationProfiles
    """`prefill`, and `decode` for graphs that run in both; or `clip` and `image`, for graphs of groups where no one
    profile holds both. The narrower one is last. Empty for engines that take any shape."""
    nodes: dict[str, Realisation]
    """How the engine computes each node of domain `sinkprune`, by the node's name."""
    device_memory: Annotated[int, Bounds(0, 1 << 50)] | None
    """Bytes of activations of an execution context; None if the build had no GPU to measure them."""
    build_seconds: float
    """The time that the library took to build the engine."""


@dataclass(frozen=True)
class EnginesManifest:
    """The content of `engines.json`."""

    format_version: int
    sinkprune_version: str
    target: Target
    library_version: str
    """The version of the library, or of two joined by +. Engines load only in exactly this version."""
    compute_capabilities: tuple[Count, ...]
    """The GPUs that the engines hold code for, e.g. 87 for sm_87; empty for engines of a CPU."""
    bundle_sha256: str
    """The sha256 of the bundle's `bundle.json`, which holds the sums of all its files."""
    checkpoint_sha256: str
    """The sha256 of the checkpoint's `config.json`, copied from the bundle."""
    plugins: dict[str, str]
    """The sha256 of each plugin's kernels, by plugin name. Loading needs plugins with the same sums."""
    flags: dict[str, str]
    """The library's build options and the build machine, by the flag's name."""
    limits: Limits
    engines: dict[str, EngineSpec]
    """The engines by graph name, as in the bundle, and for TensorRT those of the graphs that prepare frames."""
    files: dict[str, FileSpec]
    """Size and sha256 of every file of the folder but `engines.json`, by its path relative to the folder."""

    @property
    def enforced_limits(self) -> dict[str, int]:
        """Return the limits that the runtime enforces, in tokens and images, by the field of `Limits`.

        Optimisation profiles enforce all limits. Engines that take any shape enforce those the user gave.
        """
        return enforced_limits(self.limits, self.target, self.flags.get(ASKED_LIMITS, "").split())


ENGINES = ManifestFile(
    name=ENGINES_MANIFEST,
    format_version=FORMAT_VERSION,
    folder="engines",
    a_folder="a folder of engines",
    error=EnginesError,
    make="sinkprune-build BUNDLE -o {root} --target onnxruntime|onnxruntime+openvino|openvino|tensorrt|tensorrt-rtx",
    again="Build or copy the engines again.",
    upgrade="Upgrade sinkprune, or build the engines again with this one.",
)


class Engines(Folder[EnginesManifest]):
    """A folder of engines that was read: its place, its `engines.json`, and its files, held open."""

    kind = ENGINES


def read_engines(path: str | os.PathLike[str], trust: Trust = ANY) -> Engines:
    """Return the engines in the folder `path`: their manifest validated, and every file of its size and held open.

    Raises `EnginesError`, also for a manifest other than `trust` expects. `Engines.verify` compares the sums.
    """
    root = Path(path)
    recover(root, ENGINES)
    manifest, sha256 = ENGINES.read(root, EnginesManifest, trust)
    ENGINES.check_consistent(root / ENGINES_MANIFEST, _engines_complaints(manifest))
    return Engines(root, manifest, sha256, ENGINES.hold(root, manifest.files), trust)


def _engines_complaints(manifest: EnginesManifest) -> Iterator[str]:
    for graph, engine in manifest.engines.items():
        if engine.file not in manifest.files:
            yield f"has no size and sha256 for '{engine.file}'"
        profiles = engine.optimisation_profiles
        if bool(profiles) == (manifest.target in ANY_SHAPE):
            yield f"has {len(profiles)} optimisation profiles for '{graph}', unlike target '{manifest.target}'"
        for name, inputs in profiles.items():
            for tensor, shapes in inputs.items():
                sizes = [*zip_longest(shapes.min, shapes.opt, shapes.max, fillvalue=-1)]
                if not all(0 <= least <= usual <= most for least, usual, most in sizes):
                    yield (
                        f"has in optimisation profile '{name}' of '{graph}', input '{tensor}', the shapes "
                        f"{list(shapes.min)}, {list(shapes.opt)} and {list(shapes.max)}, which is no range"
                    )


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
    if os.path.lexists(root / ENGINES.name):
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
    recover(root, ENGINES)
    return _came_with(read_engines(root, trust)) if os.path.lexists(root / ENGINES.name) else read_bundle(root, trust)


def _came_with(engines: Engines) -> Bundle:
    """Return the bundle in a folder of engines: manifest, tokenizer, chat template and embedding, without graphs."""
    root = engines.path / BUNDLE_FOLDER
    files = {
        name.removeprefix(f"{BUNDLE_FOLDER}/"): file
        for name, file in engines.files.items()
        if name.startswith(f"{BUNDLE_FOLDER}/")
    }
    lacking = [name for name in (MANIFEST, *BESIDE_GRAPHS) if name not in files]
    if lacking:
        raise ENGINES.error(f"the engines '{engines.path}' came without '{lacking[0]}' of a bundle. {ENGINES.again}")
    data = files.pop(MANIFEST).read(MANIFEST_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != engines.manifest.bundle_sha256:
        raise ENGINES.error(
            f"'{root / MANIFEST}' has the sha256 {sha256}, but the engines next to it were built from a bundle of "
            f"{engines.manifest.bundle_sha256}. {ENGINES.again}"
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
    yield from contract_violations(manifest)
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
