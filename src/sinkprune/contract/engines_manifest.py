"""Folders of engines on the disk: only this module reads and writes `engines.json`.

Reading validates it as `sinkprune.contract.bundle` validates `bundle.json`. A folder of engines has a bundle's files
other than graphs too.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from sinkprune.contract.checks import Bounds, Count, Few, Size
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.folders import recover
from sinkprune.contract.files.manifest_file import FileSpec, Folder, ManifestFile
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.manifest import ENGINES_MANIFEST

FORMAT_VERSION = 4

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
