"""Vision graphs: tokens, norms, salience and DeepStack are those of transformers, Qwen's in raster order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, CLIPImageProcessorPil, LlavaForConditionalGeneration

from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.checkpoints import Shape, make_checkpoint
from support.models.clips import INTERNVL_BUDGETS
from support.models.qwen_towers import features
from support.models.small_models import INTERNVL_SHAPES, QWEN_SHAPES, SHAPES
from support.programs.slow_cases import each_once, slow_except
from support.references.steps import patch_grid

Array = np.ndarray[Any, Any]


def vision_outputs(pipeline: Pipeline, **inputs: Array) -> dict[str, Array]:
    backend = pipeline.backend
    outputs = pipeline.chain.vision({name: backend.tensor(array) for name, array in inputs.items()})
    return {name: backend.numpy(tensor) for name, tensor in outputs.items()}


def check_against_transformers(folder: Path, pipeline: Pipeline, photo: Image.Image) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    layer = model.config.vision_feature_layer
    images = [photo, photo.rotate(90), photo.crop((100, 50, 300, 350))]
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = model.model.vision_tower(pixels, output_hidden_states=True, output_attentions=True)
    features = out.hidden_states[layer][:, 1:].numpy()
    # Attention i made hidden state i + 1.
    salience = out.attentions[layer if layer < 0 else layer - 1][:, :, 0, 1:].mean(dim=1).numpy()
    ours = vision_outputs(pipeline, pixel_values=pixels.numpy())
    np.testing.assert_allclose(ours["tokens"], features, atol=1e-4)
    np.testing.assert_allclose(ours["norms"], np.linalg.norm(features, axis=-1), rtol=1e-4)
    np.testing.assert_allclose(ours["salience"], salience, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_features_norms_and_salience(
    name: str, checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    check_against_transformers(checkpoint(name), pipeline(name), photo)


@pytest.mark.parametrize("feature_layer", [-1, 2])
def test_other_feature_layers(feature_layer: int, photo: Image.Image, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", Shape(image_size=56, feature_layer=feature_layer))
    export_bundle(ExportRequest(str(folder), budgets=("retain-64",)), tmp_path / "bundle")
    check_against_transformers(folder, Pipeline.load(tmp_path / "bundle"), photo)


@pytest.mark.parametrize("name", INTERNVL_SHAPES)
def test_tokens_of_internvl_are_shuffled_patches(
    name: str, checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    """Norms are those of patches before the last norm layer, where there is one."""
    folder, pipe = checkpoint(name), pipeline(name, budgets=INTERNVL_BUDGETS, max_frames=8)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tower, ratio = model.model.vision_tower, model.config.downsample_ratio
    pixels = torch.from_numpy(pipe.family.inputs(photo)["pixel_values"])
    with torch.no_grad():
        out = tower(pixels, output_hidden_states=True, output_attentions=True)
        last = tower.encoder.layer[-1](out.hidden_states[-2])
    side, groups = int((last.shape[1] - 1) ** 0.5), len(pixels)

    def shuffled(rows: torch.Tensor) -> np.ndarray:
        squares = rows.reshape(groups, side, side, -1)
        return model.model.pixel_shuffle(squares, ratio).reshape(groups, int(side * ratio) ** 2, -1).numpy()

    ours = vision_outputs(pipe, pixel_values=pixels.numpy())
    assert groups > 2
    np.testing.assert_allclose(ours["tokens"], shuffled(out.last_hidden_state[:, 1:]), atol=1e-4)
    norms, salience = last[:, 1:].norm(dim=-1), out.attentions[-1][:, :, 0, 1:].mean(dim=1)
    np.testing.assert_allclose(ours["norms"], shuffled(norms[..., None]).max(axis=-1), rtol=1e-4)
    np.testing.assert_allclose(ours["salience"], shuffled(salience[..., None]).mean(axis=-1), atol=1e-6)


def test_salience_is_one_row_of_attention_and_later_blocks_are_not_computed(bundle: Callable[..., Path]) -> None:
    model = onnx.load(bundle("mha-336") / "graphs/vision.onnx", load_external_data=False)
    # The tower has four blocks; the features are the third's output.
    assert sum(node.op_type == "Attention" for node in model.graph.node) == 3
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    softmaxed = [shapes[node.output[0]] for node in model.graph.node if node.op_type == "Softmax"]
    assert [shape[1:] for shape in softmaxed] == [[4, 1, 577]]


Size = tuple[int, int]

# Exact windows, ragged ones on one side and on both, tall, one merged token, the paper's 480 tokens
SIZES = [(224, 224), (280, 112), (300, 520), (60, 600), (28, 28), (672, 560)]


def outputs_of(pipeline: Pipeline, image: Image.Image) -> dict[str, Array]:
    return vision_outputs(pipeline, **pipeline.family.inputs(image))


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
    ours, theirs = outputs_of(pipeline(name), image), reference(checkpoint(name), pipeline(name), image)
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
    np.testing.assert_allclose(outputs_of(pipeline, image)["salience"], expected, rtol=1e-4, atol=1e-9)


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
