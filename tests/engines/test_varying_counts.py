"""Engines take every number of tokens that a method keeps whose counts vary by picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Clip
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.engines.optimisation_profiles import optimisation_profiles
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.manifests import set_thresholds
from support.references.shapes_sent import shapes_outside_optimisation_profiles

# Everything passes, some do, and one token does.
THRESHOLDS = [(-1.0, -1.0), (1.0, 0.97), (3e38, 3e38)]
CLIP = Clip([Image.new("RGB", (170, 140), (90, 60, 30))] * 4, fps=2)
BUNDLES: dict[str, tuple[str, dict[str, Any], list[list[Any]]]] = {
    "gqa-112": ("retain-64", {"max_images": 2}, [[(64, 64)], [(64, 64), (200, 100)]]),
    "next": ("retain-320", {}, [[(64, 64)], [(230, 200)]]),
    "qwen-tied": ("prune-66.7", {"max_frames": 4}, [[(56, 56)], [(672, 560)], [CLIP]]),
    "qwen3-vl": ("prune-88.9", {"max_frames": 4}, [[(64, 64)], [(768, 640)], [CLIP]]),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_every_shape_lies_in_an_optimisation_profile(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    budget, options, pictures = BUNDLES[name]
    root = tmp_path / "bundle"
    export_bundle(ExportRequest(str(checkpoint(name)), (budget,), ("sinkpruner", "occamtoken"), **options), root)
    for thresholds in THRESHOLDS:
        set_thresholds(root, *thresholds)
        assert not shapes_outside_optimisation_profiles(read_bundle(root), pictures)


def test_the_usual_sizes_are_the_aims(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    request = ExportRequest(str(checkpoint("gqa-112")), ("retain-64",), ("occamtoken",))
    export_bundle(request, tmp_path / "bundle")
    manifest = read_bundle(tmp_path / "bundle").manifest
    evidence = manifest.plans["occamtoken"]["retain-64"].evidence
    assert evidence is not None
    before, after = (aim.of(64) for aim in evidence.aims)
    profiles = optimisation_profiles(manifest, Limits(100, 8, 1))
    quota = profiles["occamtoken/retain-64/sanitizer"]["prefill"]["quota"]
    assert (quota.min, quota.opt, quota.max) == ((1,), (before,), (64,))
    visual = profiles["occamtoken/retain-64/evidence_after_4"]["prefill"]["register"]
    assert (visual.min, visual.opt, visual.max) == ((1,), (before,), (64,))
    # 64 tokens of text are usual, and all 64 visual tokens unpruned.
    assert profiles["head"]["prefill"]["hidden"].opt[1] == 64 + after
