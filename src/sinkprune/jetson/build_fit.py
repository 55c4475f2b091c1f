"""Whether a machine has the memory and the disk to build a model's engines."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.manifest import Manifest
from sinkprune.engines.preflight import COPIES, disk_bytes, weights_bytes


@dataclass(frozen=True)
class BuildFit:
    """The needs of building engines, and whether the machine meets them."""

    memory_bytes: int
    """For the largest graph, without activations. Graphs are built one after the other."""
    disk_bytes: int
    """For all engines, next to the bundle."""
    moving_disk_bytes: int
    """For all engines, with `sinkprune-build --move`."""
    fits: bool | None
    """Whether memory and disk suffice, if known; None if both are unknown."""
    needs_move: bool
    """Whether the disk has room only with --move."""


def build_fit(manifest: Manifest, target: Target, usable_bytes: int, disk_free: int | None) -> BuildFit:
    """Return whether these bytes suffice to build engines of `manifest` for `target`; 0 and None are unknown.

    The GPU is a board's, which shares its memory with the CPU.
    """
    copies = COPIES[target]
    memory = max(weights_bytes(manifest, graph, copies.memory + copies.gpu) for graph in manifest.graphs)
    disk, moving = (disk_bytes(manifest, manifest.graphs, target, move=move) for move in (False, True))
    known = [memory <= usable_bytes] if usable_bytes else []
    known += [moving <= disk_free] if disk_free is not None else []
    return BuildFit(
        memory_bytes=memory,
        disk_bytes=disk,
        moving_disk_bytes=moving,
        fits=all(known) if known else None,
        needs_move=disk_free is not None and moving <= disk_free < disk,
    )
