"""Whether engines can be built: by hand, and as `sinkprune-build` itself computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import Target, read_bundle
from sinkprune.contract.manifest import BESIDE_GRAPHS
from sinkprune.engines.preflight import BuildMemory, disk_bytes, needed_bytes
from sinkprune.jetson.fit import build_fit
from support.programs.commands import run


def test_the_largest_graph_counts_in_memory_and_all_on_disk(bundle: Callable[..., Path]) -> None:
    source = read_bundle(bundle("mha-336", "fp16"))
    manifest = source.manifest
    weights = {graph: manifest.weight_bytes(graph) for graph in manifest.graphs}
    largest = max(weights, key=weights.__getitem__)
    beside = sum(manifest.files[name].size for name in BESIDE_GRAPHS)
    found = build_fit(manifest, "tensorrt", 0, None)
    assert found.memory_bytes == needed_bytes(
        source, largest, {}, BuildMemory("memory", 0, copies=3.2, activations=False)
    )
    # An engine without weights is small.
    code = sum(16 << 20 if own else 5 << 20 for own in weights.values())
    assert found.disk_bytes == beside + sum(weights.values()) + code
    assert beside < found.moving_disk_bytes == found.disk_bytes - sum(list(weights.values())[:-1])
    assert (found.fits, found.needs_move) == (None, False)


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_engines_of_a_cpu_take_at_most_the_computed_disk(
    target: Target, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    source = bundle("gqa-112")
    manifest = read_bundle(source).manifest
    assert run("sinkprune-build", source, "-o", tmp_path / "engines", "--target", target).code == 0
    taken = sum(file.stat().st_size for file in (tmp_path / "engines").rglob("*") if file.is_file())
    weights = sum(map(manifest.weight_bytes, manifest.graphs))
    most = disk_bytes(manifest, manifest.graphs, target, move=False)
    assert taken <= most <= taken + 2 * weights + len(manifest.graphs) * (2 << 20)


def test_a_byte_too_little_does_not_fit(bundle: Callable[..., Path]) -> None:
    manifest = read_bundle(bundle("mha-336", "fp16")).manifest
    need = build_fit(manifest, "tensorrt", 0, None)
    memory, disk, moving = need.memory_bytes, need.disk_bytes, need.moving_disk_bytes

    def fits(usable: int, free: int | None) -> tuple[bool | None, bool]:
        found = build_fit(manifest, "tensorrt", usable, free)
        return found.fits, found.needs_move

    assert fits(memory, None) == (True, False)
    assert fits(memory - 1, disk) == (False, False)
    assert fits(memory, disk) == (True, False)
    assert fits(0, disk - 1) == (True, True)
    assert fits(0, moving) == (True, True)
    assert fits(memory, moving - 1) == (False, False)
