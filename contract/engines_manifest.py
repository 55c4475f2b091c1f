"""The engines: a folder of built plans and `engines.json`, what they were built from, with and for.

This module is the only reader and writer of `engines.json`. A plan is machine code for one library version and
some GPUs; everything here is compared before any of it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sinkprune.contract.errors import EnginesError
from sinkprune.contract.manifest_file import FileSpec, ManifestFile, outside

FORMAT_VERSION = 1
MANIFEST = "engines.json"

ENGINES = ManifestFile(
    name=MANIFEST,
    format_version=FORMAT_VERSION,
    folder="engines",
    a_folder="a folder of engines",
    error=EnginesError,
    make="sinkprune-build BUNDLE -o {root} --target onnxruntime|tensorrt|tensorrt-rtx",
    again="Build or copy the engines again.",
    upgrade="Upgrade sinkprune, or build the engines again with this one.",
)

Target = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
Realisation = Literal["plugin", "function", "stripped"]
"""What became of a `TopRho` or `DiversitySelect` node: our plugin, named as such by the parser; the compiled function
body; or our plugin, after the function that would have won (before TensorRT 10.7) was stripped."""


@dataclass(frozen=True)
class Range:
    """The smallest, usual and largest shape of one input within a profile."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What a request may be at most, and the flags of sinkprune-build that raise it."""

    prompt_tokens: int
    """Text tokens of a rendered prompt (`--max-prompt`)."""
    new_tokens: int
    """Generated tokens (`--max-new-tokens`)."""
    images: int
    """Images of a prompt (`--max-images`)."""


@dataclass(frozen=True)
class EngineSpec:
    """One built graph."""

    file: str
    """Relative to the engines folder."""
    profiles: dict[str, dict[str, Range]]
    """By profile name, in the engine's order: input ranges. `prefill`, and `decode` for graphs that run in both; or
    `clip` and `image`, for graphs that are given groups where no one profile can hold both. The narrower stands last.

    Empty for onnxruntime, whose models take any shape.
    """
    nodes: dict[str, Realisation]
    """What became of each node of domain `sinkprune`, by the node's name."""
    device_memory: int | None
    """Bytes of activations an execution context needs; None where only a GPU could tell and the build had none."""
    build_seconds: float


@dataclass(frozen=True)
class EnginesManifest:
    """The content of `engines.json`."""

    format_version: int
    sinkprune_version: str
    target: Target
    library_version: str
    """Of onnxruntime, tensorrt or tensorrt_rtx; engines load in exactly this one."""
    compute_capabilities: tuple[int, ...]
    """The SMs the plans hold code for, e.g. 87; empty for onnxruntime."""
    bundle_sha256: str
    """Of the bundle's `bundle.json`, which holds the sums of all its files."""
    checkpoint_sha256: str
    """Of the checkpoint's `config.json`, as in the bundle."""
    plugins: dict[str, str]
    """The sha256 of each plugin's kernels, by plugin name; a plugin must be there in this version when loaded."""
    flags: dict[str, str]
    """Builder flags that were set."""
    limits: Limits
    engines: dict[str, EngineSpec]
    """By graph name, as in the bundle."""
    files: dict[str, FileSpec]


@dataclass(frozen=True)
class Engines:
    """Engines on disk."""

    path: Path
    manifest: EnginesManifest

    def file(self, name: str) -> Path:
        """The path of a file named in the manifest."""
        return self.path / name

    def engine_path(self, graph: str) -> Path:
        """The path of a graph's engine."""
        return self.path / self.manifest.engines[graph].file


def read_engines(path: str | os.PathLike[str]) -> Engines:
    """The engines at `path`, their manifest validated and every file present at its size; raises `EnginesError`."""
    root = Path(path)
    manifest = ENGINES.read(root, EnginesManifest)
    _check_consistent(root / MANIFEST, manifest)
    ENGINES.check_sizes(root, manifest.files)
    return Engines(root, manifest)


def verify_engines(engines: Engines, on_bytes: Callable[[int], None] = lambda count: None) -> None:
    """Compare every file with its sha256; `on_bytes` is told of progress. Raises `EnginesError`."""
    ENGINES.check_sums(engines.path, engines.manifest.files, on_bytes)


def write_engines_manifest(root: Path, manifest: EnginesManifest) -> None:
    """Write `engines.json` into the folder `root`."""
    ENGINES.write(root, manifest)


def _check_consistent(path: Path, manifest: EnginesManifest) -> None:
    """Refuse a manifest whose parts do not fit each other, or whose files lie outside its folder."""
    for name in [*manifest.files, *(engine.file for engine in manifest.engines.values())]:
        if outside(name):
            raise EnginesError(f"'{path}' names the file '{name}', which lies outside its folder.")
    for graph, engine in manifest.engines.items():
        if engine.file not in manifest.files:
            raise EnginesError(f"'{path}' has no size and sha256 for '{engine.file}'. {ENGINES.again}")
        if bool(engine.profiles) != (manifest.target != "onnxruntime"):
            raise EnginesError(
                f"'{path}' has {len(engine.profiles)} profiles for '{graph}', which does not go with target "
                f"'{manifest.target}'. {ENGINES.again}"
            )
        for profile, inputs in engine.profiles.items():
            for tensor, shapes in inputs.items():
                _check_range(path, f"profile '{profile}' of '{graph}', input '{tensor}'", shapes)


def _check_range(path: Path, where: str, shapes: Range) -> None:
    ranks = {len(shapes.min), len(shapes.opt), len(shapes.max)}
    sizes = zip(shapes.min, shapes.opt, shapes.max, strict=False)
    if len(ranks) != 1 or not all(0 <= least <= usual <= most for least, usual, most in sizes):
        raise EnginesError(
            f"'{path}', {where}: smallest, usual and largest shape are {list(shapes.min)}, {list(shapes.opt)} and "
            f"{list(shapes.max)}, which is no range. {ENGINES.again}"
        )
