"""Small random pi0-FAST checkpoints in LeRobot's form, with a FAST tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from tokenizers.trainers import BpeTrainer
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, PreTrainedTokenizerFast

from sinkprune.export.checkpoint import lerobot
from sinkprune.export.checkpoint.presets import PRESETS
from support.models.lerobot_checkpoints import policy_features, policy_fields, write_pipelines
from support.models.pi0_checkpoints import PaliGemmaShape, make_paligemma_checkpoint, pi0_tokenizer

VOCAB, SKIP, FAST = 480, 4, 120
"""The tokens of the small vocabulary, those at its end, and the most of FAST before them."""
SCALE = 10
STATE, ACTION = "observation.state", "action"
_MERGES = [("A", "c"), ("Ac", "t"), ("Act", "i"), ("Acti", "o"), ("Actio", "n")]
_WORDS = ["A", *("".join(pair) for pair in _MERGES), ":", "|", ";", "S", "T", *"0123456789"]
TOKENIZER = pi0_tokenizer(VOCAB, _WORDS, _MERGES)


@dataclass(frozen=True)
class Pi0FastShape:
    """What the small checkpoints of pi0-FAST differ in."""

    model: PaliGemmaShape = field(default_factory=PaliGemmaShape)
    chunk: int = 5
    state: int = 6
    width: int = 3
    """The numbers of an action."""
    most: int = 9
    """The most tokens that are decoded."""


PI0_FAST_SHAPES = {
    "pi0-fast": Pi0FastShape(),
    "pi0-fast-odd": Pi0FastShape(
        PaliGemmaShape(image_size=84, num_layers=7, num_heads=2), chunk=1, state=2, width=7, most=4
    ),
}


def cosines(count: int) -> np.ndarray[Any, Any]:
    """[count,count]: the orthogonal DCT of type 2, by its definition: a row is a frequency."""
    places = np.arange(count)
    rows = np.cos(np.pi * places[:, None] * (2 * places + 1) / (2 * count)) * np.sqrt(2 / count)
    rows[0] /= np.sqrt(2)
    return rows


def make_fast_tokenizer(folder: Path, chunk: int, width: int) -> PreTrainedTokenizerFast:
    """Write a FAST tokenizer, fitted to random walks as its own code does, into `folder`."""
    random = np.random.default_rng(0)
    steps = random.standard_normal((200, chunk, width)).cumsum(axis=1) * 0.3
    coefficients = np.around((cosines(chunk) @ np.tanh(steps)) * SCALE).astype(int).reshape(200, -1)
    least, most = int(coefficients.min()), int(coefficients.max())
    bpe = ByteLevelBPETokenizer()
    trainer = BpeTrainer(
        vocab_size=FAST,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        # As there: characters, and not the letters of bytes.
        initial_alphabet=[chr(place) for place in range(most - least + 1)],
    )
    bpe._tokenizer.train_from_iterator(("".join(map(chr, row - least)) for row in coefficients), trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, clean_up_tokenization_spaces=True)
    tokenizer.save_pretrained(folder)
    settings = {"scale": SCALE, "min_token": least, "vocab_size": FAST, "time_horizon": None, "action_dim": None}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return tokenizer


def make_pi0_fast_checkpoint(folder: Path, shape: Pi0FastShape, **changes: Any) -> Any:
    """Write a checkpoint as LeRobot saves it, into the new `folder`; `changes` are other fields of config.json.

    Returns the model in transformers.
    """
    source = folder.with_name(f"{folder.name}-source")
    source.mkdir()
    make_paligemma_checkpoint(source, replace(shape.model, vocab_size=VOCAB, image_token=VOCAB), seed=3)
    model = PaliGemmaForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()
    folder.mkdir()
    fast = make_fast_tokenizer(folder / "action_tokenizer", shape.chunk, shape.width)
    with torch.no_grad():
        # Answers are tokens of FAST, and a large table would repeat the last one.
        model.lm_head.weight *= 0.1
        model.lm_head.weight[: VOCAB - SKIP - len(fast)] *= 0.1
        model.lm_head.weight[VOCAB - SKIP :] *= 0.1
    model.save_pretrained(source)
    tensors = {}
    for name, own in load_file(source / "model.safetensors").items():
        # LeRobot's file has the table as its head alone.
        last = name.replace("language_model.model.", "language_model.")
        last = last.replace("vision_tower.", "vision_tower.vision_model.")
        last = "lm_head.weight" if "embed_tokens" in name else f"model.{last}"
        tensors[f"model.paligemma_with_expert.paligemma.{last}"] = own
    save_file(tensors, folder / "model.safetensors")
    TOKENIZER.save_pretrained(folder)
    random, side = np.random.default_rng(1), shape.model.image_size
    statistics = {}
    for key, width in ((STATE, shape.state), (ACTION, shape.width)):
        low = random.uniform(-2, -1, width).astype(np.float32)
        statistics[key] = {"q01": low, "q99": low + random.uniform(1, 4, width).astype(np.float32)}
    features, actions = policy_features(shape.state, shape.width)
    modes = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    written = {
        **policy_fields("pi0_fast", side, shape.chunk, 8, 8),
        "input_features": features,
        "output_features": actions,
        "max_action_tokens": 256,
        "use_relative_actions": False,
        "empty_cameras": 0,
        "tokenizer_max_length": 200,
        "text_tokenizer_name": lerobot.TOKENIZER,
        "action_tokenizer_name": "lerobot/fast-action-tokenizer",
        "temperature": 0.0,
        "max_decoding_steps": shape.most,
        "fast_skip_tokens": SKIP,
        "validate_action_token_prefix": False,
        "use_kv_cache": True,
        "normalization_mapping": modes,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(written))
    write_pipelines(folder, "pi0_fast", {**features, **actions}, modes, statistics)
    return model


def use_small_preset(monkeypatch: pytest.MonkeyPatch, config: PaliGemmaConfig) -> None:
    """Have LeRobot's variants name the sizes of the small model: the true ones are of gigabytes."""
    made = json.loads(config.to_json_string(use_diff=False))
    sizes = {key: made["text_config"][key] for key in ("hidden_size", "intermediate_size")}
    monkeypatch.setattr(lerobot, "VARIANTS", dict.fromkeys(lerobot.VARIANTS, sizes))
    monkeypatch.setitem(PRESETS, "pi0-fast", {**made, "model_type": "pi0_fast", "architectures": ["PI0FastPolicy"]})
