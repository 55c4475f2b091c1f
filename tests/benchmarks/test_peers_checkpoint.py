"""The checkpoint that every engine is measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from peer_engines.checkpoint import chat_text, make_checkpoint, random_picture, weight_bytes
from peer_engines.transformers_engine import Prompt
from sinkprune import Pipeline
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.peer_shapes import LLAVA, QWEN, QWEN3

CONFIGS = {"llava": (LLAVA, 336), "qwen": (QWEN, 112), "qwen3": (QWEN3, 96)}


@pytest.fixture(scope="module", params=list(CONFIGS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, int]:
    """A checkpoint's folder, its configuration, and the side of a picture for it."""
    config, side = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    make_checkpoint(folder, config)
    return folder, config, side


def test_transformers_and_the_exporter_read_the_same_model_from_it(
    made: tuple[Path, Any, int], tmp_path: Path
) -> None:
    folder, config, side = made
    assert AutoConfig.from_pretrained(folder).text_config.hidden_size == config["text_config"]["hidden_size"]
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) * 2 == weight_bytes(folder)
    picture, question = random_picture(3, side), "What is there on the old chair?"
    inputs = Prompt(folder, model.config)(chat_text(folder, question), Image.fromarray(picture))
    theirs = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, -4:]
    export_bundle(ExportRequest(str(folder), budgets=()), tmp_path / "bundle")
    pipeline = Pipeline.load(tmp_path / "bundle", threads=1)
    ours = pipeline.generate(picture, question, budget="none", max_new_tokens=4, min_new_tokens=4)
    assert ours.token_ids == theirs.tolist()
    assert ours.prompt_tokens + ours.visual_tokens == inputs["input_ids"].shape[1]
