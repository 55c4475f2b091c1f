"""The vision graphs of Qwen's families: tokens, norms, salience and DeepStack are transformers', in raster order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.qwen_towers import features
from support.models.small_models import QWEN_SHAPES
from support.programs.slow_cases import each_once, slow_except
from support.references.steps import patch_grid

Array = np.ndarray[Any, Any]
Size = tuple[int, int]

# Exact windows, ragged ones on one side and on both, tall, one merged token, the paper's 480 tokens
SIZES = [(224, 224), (280, 112), (300, 520), (60, 600), (28, 28), (672, 560)]


def outputs(pipeline: Pipeline, image: Image.Image) -> dict[str, Array]:
    backend = pipeline.backend
    inputs = {name: backend.tensor(array) for name, array in pipeline.family.inputs(image).items()}
    return {name: backend.numpy(tensor) for name, tensor in pipeline.chain.vision(inputs).items()}


def reference(folder: Path, pipeline: Pipeline, image: Image.Image, block: int = -2) -> dict[str, Array]:
    """From transformers' eager attention."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    grid = torch.tensor([patch_grid(pipeline, image)])
    pixels = torch.from_numpy(pipeline.family.inputs(image)["pixel_values"]).flatten(0, 1)
    found = features(model.model.visual, pixels, grid, block)
    return {name: tensor[None].numpy() for name, tensor in found._asdict().items() if tensor is not None}


@pytest.mark.parametrize(("name", "size"), each_once(QWEN_SHAPES, SIZES))
def test_tokens_norms_and_salience(
    name: str, size: Size, checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    image = photo.resize(size)
    ours, theirs = outputs(pipeline(name), image), reference(checkpoint(name), pipeline(name), image)
    assert ours["norms"].shape == (1, pipeline(name).family.layout(image).tokens)
    np.testing.assert_allclose(ours["tokens"], theirs["tokens"], atol=1e-4)
    np.testing.assert_allclose(ours["norms"], theirs["norms"], rtol=1e-4)
    np.testing.assert_allclose(ours["salience"], theirs["salience"], rtol=1e-4, atol=1e-9)
    assert ours.keys() == theirs.keys()
    if "deepstack" in ours:
        np.testing.assert_allclose(ours["deepstack"], theirs["deepstack"], atol=1e-4)
    # What every patch gives away arrives somewhere.
    assert ours["salience"].sum() * 4 == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("name", slow_except({"qwen", "qwen-tied"}, QWEN_SHAPES))
def test_salience_of_the_last_block_on_request(
    name: str, checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    # The last block is full-attention in one of them and windowed in the other.
    request = ExportRequest(str(checkpoint(name)), budgets=("prune-77.8",), salience="last")
    vision = export_bundle(request, tmp_path / "bundle").vision
    assert vision.salience_block == vision.num_blocks - 1
    pipeline, image = Pipeline.load(tmp_path / "bundle"), photo.resize((300, 520))
    expected = reference(checkpoint(name), pipeline, image, block=-1)["salience"]
    np.testing.assert_allclose(outputs(pipeline, image)["salience"], expected, rtol=1e-4, atol=1e-9)


def test_windowed_blocks_hold_nothing_that_grows_with_the_image_squared(bundle: Callable[..., Path]) -> None:
    """Every attention, mask and softmax of a windowed block is over 64 slots."""
    model = onnx.load(bundle("qwen") / "graphs/vision.onnx", load_external_data=False)
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in [*inferred.value_info, *inferred.input, *inferred.output]
    }
    attentions = [node for node in inferred.node if node.op_type == "Attention"]
    masked = [len(node.input) > 3 and node.input[3] != "" for node in attentions]
    # Full blocks are 1 and 3, and need no mask.
    assert masked == [True, False, True, False]
    for node, windowed in zip(attentions, masked, strict=True):
        slots = shapes[node.input[0]][2]
        assert (slots == 64) == windowed
    softmaxes = [shapes[node.output[0]][2:] for node in inferred.node if node.op_type == "Softmax"]
    assert softmaxes == [[64, 64]]
