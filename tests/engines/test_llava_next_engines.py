"""LLaVA-NeXT graphs pass TensorRT's compiler; every number of tiles has an optimisation profile."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Range, read_engines
from sinkprune.export.dialects import DIALECTS
from support.models.heads_of_64 import NEXT_CONFIG, export_random
from support.programs.commands import run
from support.references.shapes_sent import shapes_outside_optimisation_profiles

BUDGETS = ("retain-320", "retain-160+raster+visual-keys+compact")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorrt-rtx has wheels for x86-64 only")
@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tensorrt_rtx_builds_every_graph(dialect: str, tmp_path: Path) -> None:
    bundle = export_random(tmp_path, NEXT_CONFIG, budgets=BUDGETS, precision="fp16", dialect=dialect)
    outcome = run(
        "sinkprune-build", bundle.path, "-o", tmp_path / "engines", "--target", "tensorrt-rtx", "--sm", "86,89,120"
    )
    assert outcome.code == 0, outcome.stderr
    built = read_engines(tmp_path / "engines").manifest.engines
    assert set(built) == set(bundle.manifest.graphs)
    pixels = built["vision"].optimisation_profiles["prefill"]["pixel_values"]
    assert pixels == Range((1, 3, 336, 336), (5, 3, 336, 336), (5, 3, 336, 336))
    norms = built["sinkpruner/retain-320/select_after_0"].optimisation_profiles["prefill"]["norms"]
    assert norms == Range((1, 576), (5, 576), (5, 576))
    # Unpruned, an image on 2x2 tiles has 48 lines of 48 tokens and a newline
    assert built["decoder_0"].optimisation_profiles["prefill"]["hidden"].max[1] >= 576 + 48 * 49


def test_every_shape_of_every_picture_lies_in_an_optimisation_profile(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("next", "fp32", ("retain-320", "retain-320+no-sanitizer")))
    assert not shapes_outside_optimisation_profiles(opened, [[(224, 224)], [(336, 112)], [(112, 112)], [(5, 900)]])
