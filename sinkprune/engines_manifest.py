"""The engines: a folder of built plans and `engines.json`, what they were built from, with and for.

This module is the only reader and writer of `engines.json`. A plan is machine code for one library version and
some GPUs; everything here is compared before any of it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sinkprune.bundle import FileSpec

FORMAT_VERSION = 1
MANIFEST = "engines.json"

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
    """By profile name (`prefill`, and `decode` for graphs that run in both), in the engine's order: input ranges."""
    nodes: dict[str, Realisation]
    """What became of each node of domain `sinkprune`, by the node's name."""
    device_memory: int
    """Bytes of activations an execution context needs."""
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
