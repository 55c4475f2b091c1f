"""The TensorRT backend on a GPU: replays of CUDA graphs give what eager calls give. Never run yet.

TensorRT's guide advises one execution context for each captured graph: to modify a context makes replaying its graphs
undefined. Ours captures one for each room of the caches, which engines that update them in place have one of. Here
it shows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BackendError
from sinkprune.runtime.device.cuda import open_device
from support.models.heads_of_64 import export_random
from support.programs.commands import run
from support.references.steps import ask

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt-rtx"])
def pipelines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, Pipeline]:
    """The same bundle on the backend and on ONNX Runtime."""
    pytest.importorskip(request.param.replace("-", "_"))
    try:
        open_device()
    except BackendError as error:
        pytest.skip(str(error))
    folder: Path = tmp_path_factory.mktemp(request.param)
    bundle, engines = export_random(folder, budgets=("retain-64",), precision="fp16").path, folder / "engines"
    outcome = run("sinkprune-build", bundle, "-o", engines, "--target", request.param)
    if "does not build for sm_" in outcome.stderr:
        pytest.skip(outcome.stderr)
    assert outcome.code == 0, outcome.stderr
    return Pipeline.load(bundle, backend=request.param, engines=engines), Pipeline.load(bundle)


@pytest.mark.parametrize("budget", ["none", "retain-64"])
def test_replays_equal_eager_calls(budget: str, pipelines: tuple[Pipeline, Pipeline], photo: Image.Image) -> None:
    pipeline, _ = pipelines
    answer, eager = ask(pipeline, photo, budget, 30)
    # Captured, then replayed, with another budget in between.
    for _ in range(4):
        ask(pipeline, photo, {"none": "retain-64", "retain-64": "none"}[budget], 10)
        again, logits = ask(pipeline, photo, budget, 30)
        assert again.token_ids == answer.token_ids
        np.testing.assert_allclose(logits, eager, rtol=1e-3, atol=1e-3 * float(np.abs(eager).max()))


def test_the_first_logits_are_those_of_onnxruntime(pipelines: tuple[Pipeline, Pipeline], photo: Image.Image) -> None:
    (_, found), (_, expected) = (ask(pipeline, photo, "none", 1) for pipeline in pipelines)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
