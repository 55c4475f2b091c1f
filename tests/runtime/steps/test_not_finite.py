"""Values that are not finite are rejected before tokens are selected by them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError, NumericsError
from sinkprune.contract.precision import DTYPES
from sinkprune.runtime.backends import Backend, Engine, Tensor
from support.programs.slow_cases import each_once

ALL = {"gqa-112": "retain-64", "next": "retain-160", "qwen": "prune-80", "qwen2-vl": "prune-80"}
"""A small bundle of every family, and a budget of its."""
Bundles = Callable[..., Path]


def filled(source: Path, target: Path, graph: str, value: float) -> Path:
    """A copy of a bundle whose weights of one graph are all of one number."""
    path = Path(shutil.copytree(source, target))
    weights, dtype = path / "graphs" / "weights" / f"{graph}.bin", DTYPES[read_bundle(path).manifest.precision]
    np.full(weights.stat().st_size // dtype.itemsize, value, dtype).tofile(weights)
    return path


def noting(ran: list[str], *, overflows: bool = False) -> Any:
    """Return what lists in `ran` the graphs that ran, whose tokens may overflow."""

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def run_noted(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            ran.append(graph)
            given = engine(inputs)
            if overflows:
                tokens = backend.numpy(given["tokens"])
                tokens[0, -1, 0] = np.inf
                given["tokens"] = backend.tensor(tokens)
            return given

        return run_noted

    return wrap


@pytest.mark.parametrize(("name", "value", "budget"), each_once(ALL, [np.nan, np.inf, 1e38], ["pruned", "none"]))
def test_a_tower_whose_features_are_not_finite_is_refused(
    name: str, value: float, budget: str, bundle: Bundles, photo: Image.Image, tmp_path: Path
) -> None:
    ran: list[str] = []
    broken = filled(bundle(name), tmp_path / "broken", "vision", value)
    pipeline = Pipeline.load(broken, check_sums=False, wrap=noting(ran))
    with pytest.raises(NumericsError, match=r"norms or salience that are not finite.*--precision fp32"):
        pipeline.generate(photo, "What is this?", budget=ALL[name] if budget == "pruned" else "none")
    assert ran == ["vision"]
    with pytest.raises(NumericsError, match="not finite"):
        pipeline.encode(photo)


def test_tokens_that_overflow_behind_the_norms_are_refused(bundle: Bundles, photo: Image.Image) -> None:
    # Qwen's merger stands between the features whose norms are told and the tokens.
    ran: list[str] = []
    pipeline = Pipeline.load(bundle("qwen"), wrap=noting(ran, overflows=True))
    with pytest.raises(NumericsError, match="tokens that are not finite"):
        pipeline.generate(photo, "What is this?", budget="prune-80")
    assert ran == ["vision"]


@pytest.mark.parametrize(
    ("value", "graph", "budget"),
    each_once([np.nan, 1e38], ["projector", "decoder_0", "decoder_1", "head"], ["retain-64", "none"]),
)
def test_states_and_logits_that_are_not_finite_are_refused(
    value: float, graph: str, budget: str, bundle: Bundles, photo: Image.Image, tmp_path: Path
) -> None:
    pipeline = Pipeline.load(filled(bundle("gqa-112"), tmp_path / "broken", graph, value), check_sums=False)
    for options in ({"max_new_tokens": 2}, {"choice": ["red", "blue"]}):
        with pytest.raises(NumericsError, match="logits are not finite"):
            pipeline.generate(photo, "What is this?", budget=budget, **options)


@pytest.mark.parametrize("name", ALL)
def test_settings_that_make_no_finite_pixels_are_refused(name: str, bundle: Bundles, tmp_path: Path) -> None:
    path = Path(shutil.copytree(bundle(name), tmp_path / "broken")) / "bundle.json"
    manifest = json.loads(path.read_text())
    for settings in ({"rescale_factor": 1e300}, {"image_std": [0.5, 0.0, 0.5]}, {"image_mean": [1e300, 0.5, 0.5]}):
        path.write_text(json.dumps({**manifest, "processor": {**manifest["processor"], **settings}}))
        with pytest.raises(BundleError, match=r"not finite in float32.*preprocessor_config\.json"):
            Pipeline.load(path.parent, check_sums=False)
