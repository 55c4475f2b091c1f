"""The vision graph: features, norms and CLS salience are those of the transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from support.models.small_models import INTERNVL_SHAPES, SHAPES


def vision_outputs(pipeline: Pipeline, pixels: np.ndarray) -> dict[str, np.ndarray]:
    backend = pipeline.backend
    outputs = pipeline.chain.vision({"pixel_values": backend.tensor(pixels)})
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
    ours = vision_outputs(pipeline, pixels.numpy())
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

    ours = vision_outputs(pipe, pixels.numpy())
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
