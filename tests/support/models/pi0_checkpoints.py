"""Small random checkpoints of pi0, pi0.5 and PaliGemma in Hugging Face format, policies with random statistics."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, normalizers
from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PI0Config,
    PI0ForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from support.models.checkpoints import add_specials, byte_pairs, byte_tokens
from support.models.peer_shapes import siglip_config, sizes

VOCAB = 320
IMAGE_TOKEN = VOCAB
"""The image token follows the embedding table, as in PaliGemma."""
TOWER = sizes(96, 64, 3, 4)


@dataclass(frozen=True)
class Pi0Shape:
    """What the small checkpoints of pi0 differ in."""

    image_size: int = 112
    num_layers: int = 8
    num_heads: int = 4
    chunk: int = 5
    state_dim: int = 6
    action_dim: int = 4
    statistics: bool = True
    """Whether the checkpoint has the statistics of states and actions."""


@torch.no_grad()
def draw_weights(model: torch.nn.Module, decoder: torch.nn.Module) -> None:
    """Fill a model with random weights, so large that attention is far from uniform; `decoder` is its Gemma."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.normal_(std=0.1)
        elif parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    decoder.embed_tokens.weight.normal_(std=0.2)  # type: ignore[operator,union-attr]


def make_pi0_checkpoint(folder: Path, shape: Pi0Shape, seed: int = 0) -> Path:
    """Write a pi0 checkpoint with random weights, tokenizer, processor and statistics into the new `folder`."""
    torch.manual_seed(seed)
    model = PI0ForConditionalGeneration(pi0_config(shape)).eval()
    draw_weights(model, model.model.vlm.language_model)
    model.save_pretrained(folder)
    pi0_tokenizer().save_pretrained(folder)
    random = np.random.default_rng(seed)
    statistics = {
        f"{kind}_{name}": [round(float(value), 3) for value in random.uniform(0.3, 2.0, width)]
        for kind, width in (("state", shape.state_dim - 1), ("actions", shape.action_dim - 1))
        for name in ("mean", "std")
        if shape.statistics
    }
    size = shape.image_size
    squares = {"size": {"max_height": size, "max_width": size}, "pad_size": {"height": size, "width": size}}
    pixels = {"image_processor_type": "PI0ImageProcessor", "do_pad": True, **squares, **siglip_pixels(size)}
    processor = {"processor_class": "PI0Processor", "image_processor": pixels, **statistics}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def pi0_config(shape: Pi0Shape) -> PI0Config:
    """The configuration of a small pi0."""
    decoder, expert = (
        {"model_type": "gemma", "head_dim": 16, **sizes(width, inner, shape.num_layers, shape.num_heads, 1)}
        for width, inner in ((64, 96), (32, 64))
    )
    return PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "projection_dim": 64,
            "image_token_id": IMAGE_TOKEN,
            "text_config": {**decoder, "vocab_size": VOCAB},
            "vision_config": siglip_config(shape.image_size, 64, TOWER),
        },
        dit_config=expert,
        chunk_size=shape.chunk,
        max_state_dim=shape.state_dim,
        max_action_dim=shape.action_dim,
    )


def siglip_pixels(size: int) -> dict[str, Any]:
    """The settings that image processors of SigLIP's squares of `size` pixels share."""
    return {
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
        "rescale_factor": 1 / 255,
        "resample": 3,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_seq_length": (size // 14) ** 2,
    }


def pi0_tokenizer(
    vocab_size: int = VOCAB, words: Sequence[str] = (), merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer of Gemma's kind: metaspace without a prefix, byte fallback, BOS in front.

    `words` are further tokens, which may be `merges` of others.
    """
    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, **byte_tokens(4)}
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,", *words]
    vocabulary |= {letter: 260 + place for place, letter in enumerate(letters)}
    vocabulary |= {f"▁filler{number}": number for number in range(260 + len(letters), vocab_size)}
    backend = byte_pairs(vocabulary, [*merges])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    add_specials(backend, ("<pad>", "<eos>", "<bos>", "<unk>", "<image>"), "<bos>")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )


EXPERT = "paligemma_with_expert.gemma_expert.model."
_PI0_ONLY = re.compile(r"state_proj|action_time_mlp|gemma_expert.*norm")
Array = np.ndarray[Any, Any]


def make_pi05_checkpoint(folder: Path, shape: Pi0Shape, seed: int = 0) -> Path:
    """Write a pi0.5 checkpoint with random weights, tokenizer and statistics by ranges into the new `folder`."""
    make_pi0_checkpoint(folder, shape, seed)
    random, config = np.random.default_rng(seed), json.loads((folder / "config.json").read_text())
    width = config["dit_config"]["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: values for name, values in tensors.items() if not _PI0_ONLY.search(name)}
    norms = [
        f"layers.{layer}.{which}_layernorm"
        for layer in range(shape.num_layers)
        for which in ("input", "post_attention")
    ]
    layers = {f"{EXPERT}{norm}.dense": 3 for norm in (*norms, "norm")} | {"time_mlp_in": 1, "time_mlp_out": 1}
    for name, parts in layers.items():
        # Large enough that scales, shifts and gates differ from 0 by far, and from step to step.
        tensors[f"{name}.weight"] = drawn(random, 1.5 * width**-0.5, parts * width, width)
        tensors[f"{name}.bias"] = drawn(random, 0.5, parts * width)
    save_file(tensors, folder / "model.safetensors")
    config |= {"model_type": "pi05", "architectures": ["PI05Policy"]}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "processor_config.json").read_text())
    settings = {name: value for name, value in settings.items() if not name.endswith(("_mean", "_std"))}
    for name, count in (("state", shape.state_dim - 1), ("actions", shape.action_dim - 1)):
        for which, least in (("low", -1.5), ("high", 0.5)) if shape.statistics else ():
            settings[f"{name}_{which}"] = [round(float(x), 3) for x in random.uniform(least, least + 1, count)]
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def drawn(random: np.random.Generator, std: float, *shape: int) -> Array:
    return (std * random.standard_normal(shape)).astype(np.float32)


@dataclass(frozen=True)
class PaliGemmaShape:
    """What the small checkpoints of PaliGemma differ in."""

    image_size: int = 112
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 1
    vocab_size: int = 384
    image_token: int = IMAGE_TOKEN
    tied: bool = True
    bias: bool = False
    """Whether the projections of attention have biases."""


def make_paligemma_checkpoint(folder: Path, shape: PaliGemmaShape, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, tokenizer and image processor, but no chat template, into `folder`."""
    torch.manual_seed(seed)
    model = PaliGemmaForConditionalGeneration(paligemma_config(shape)).eval()
    draw_weights(model, model.model.language_model)
    with torch.no_grad():
        # Few answers have bytes that are no text, of which transformers decodes a whole run at once.
        model.lm_head.weight[4:260] *= 0.2
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    pi0_tokenizer().save_pretrained(folder)
    size = shape.image_size
    processor = {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "PaliGemmaProcessor",
        "do_convert_rgb": None,
        **siglip_pixels(size),
        "size": {"height": size, "width": size},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def paligemma_config(shape: PaliGemmaShape) -> PaliGemmaConfig:
    """The configuration of a small PaliGemma."""
    return PaliGemmaConfig(
        projection_dim=72,
        image_token_index=shape.image_token,
        tie_word_embeddings=shape.tied,
        text_config={
            "model_type": "gemma",
            **sizes(72, 96, shape.num_layers, shape.num_heads, shape.num_kv_heads),
            "head_dim": 16,
            "vocab_size": shape.vocab_size,
            "attention_bias": shape.bias,
            "max_position_embeddings": 1024,
        },
        vision_config=siglip_config(shape.image_size, 72, TOWER),
    )
