"""The checkpoint that every engine is measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from peer_engines.checkpoint import chat_text, make_checkpoint, random_picture, weight_bytes
from peer_engines.transformers_engine import Prompt
from sinkprune import Pipeline
from sinkprune.contract.errors import UsageError
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


def test_weights_are_bf16_and_the_shards_are_those_the_index_names(made: tuple[Path, Any, int]) -> None:
    folder, _, _ = made
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values())
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_one_that_lies_there_is_kept_and_another_is_refused(made: tuple[Path, Any, int]) -> None:
    folder, config, _ = made
    before = (folder / "config.json").stat().st_mtime_ns
    make_checkpoint(folder, config)
    assert (folder / "config.json").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="holds a checkpoint of another configuration"):
        make_checkpoint(folder, {**config, "tie_word_embeddings": "other"})


def test_a_picture_is_its_seeds_and_no_other(made: tuple[Path, Any, int]) -> None:
    first, again, other = random_picture(1, 30), random_picture(1, 30), random_picture(2, 30)
    assert first.shape == (30, 30, 3) and first.dtype == np.uint8
    assert (first == again).all() and (first != other).mean() > 0.9


def test_the_words_around_a_picture_are_the_templates(made: tuple[Path, Any, int]) -> None:
    folder, _, _ = made
    shown = chat_text(folder, "What?")
    assert shown.count("<image>") + shown.count("<|image_pad|>") == 1
    replaced = chat_text(folder, "What?", "[here]")
    assert replaced.count("[here]") == 1 and "<image>" not in replaced and "image_pad" not in replaced
