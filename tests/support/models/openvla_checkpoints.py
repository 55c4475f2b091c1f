"""Small random checkpoints of OpenVLA and OpenVLA-OFT, as their training leaves them: shards, `.pt` files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sinkprune.export.checkpoint.presets import PRESETS
from support.models import peer_shapes
from support.models.checkpoints import as_llama, byte_pairs, byte_tokens, with_specials

VOCAB, PAD, EMPTY, STOP = 32064, 32000, 29871, 2
"""Those of every published checkpoint: the code names them."""
HEADS = ("action_head", "proprio_projector")


@dataclass(frozen=True)
class OpenVlaShape:
    """What the small checkpoints of OpenVLA-OFT differ in. The defaults are LIBERO's numbers."""

    image_size: int = 112
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 4
    chunk: int = 8
    action_dim: int = 7
    state_dim: int = 8
    """0 for a checkpoint without a projector of states."""
    blocks: int = 2
    registers: int = 4
    data_sets: tuple[str, ...] = ("libero_spatial_no_noops",)
    head: bool = True
    """Whether actions are rows that a head reads, and not tokens."""
    prefix: str = ""
    """What names in `.pt` files begin with."""


WIDTHS = (32, 64)
"""Of DINOv2 and SigLIP."""
HIDDEN, INNER, TOWER_DEPTH, TOWER_HEADS = 64, 96, 4, 4


def make_openvla_checkpoint(folder: Path, shape: OpenVlaShape, seed: int = 0) -> Path:
    """Write a checkpoint with random weights into the new `folder`."""
    torch.manual_seed(seed)
    tensors = {name: drawn(name, size) for name, size in sizes(shape)}
    # Greedy tokens are those of bins.
    tensors["language_model.lm_head.weight"][PAD - 256 : PAD] *= 3
    index = {}
    names = [name for name in tensors if not name.startswith(HEADS)]
    for number in range(2):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[number::2]}, folder / file)
        index |= dict.fromkeys(names[number::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    # As the originals: the head in bfloat16, the projector in float32.
    for part in HEADS:
        own = {name.removeprefix(f"{part}."): tensor for name, tensor in tensors.items() if name.startswith(part)}
        if own:
            torch.save(
                {f"{shape.prefix}{name}": tensor for name, tensor in own.items()},
                folder / f"{part}--150000_checkpoint.pt",
            )
    (folder / "config.json").write_text(json.dumps(config(shape)))
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics(shape, seed)))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor(shape)))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PrismaticProcessor"}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": STOP}))
    llama_tokenizer().save_pretrained(folder)
    return folder


def config(shape: OpenVlaShape) -> dict[str, Any]:
    """The published config.json, with the sizes of small towers and of a small decoder."""
    towers = [
        {"embed_dim": width, "depth": TOWER_DEPTH, "num_heads": TOWER_HEADS, "mlp_ratio": ratio, "reg_tokens": count}
        for width, ratio, count in zip(WIDTHS, (2.0, 1.7), (shape.registers, 0), strict=True)
    ]
    published = {name: value for name, value in PRESETS["openvla-7b"].items() if name != "action_dim"}
    return {
        **published,
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "image_sizes": [shape.image_size] * 2,
        "timm_model_args": towers,
        "llm_backbone_id": "llama2-7b-pure",
        "norm_stats": {"other": {}},
        "text_config": {
            **published["text_config"],
            "pad_token_id": PAD,
            **peer_shapes.sizes(HIDDEN, INNER, shape.num_layers, shape.num_heads, shape.num_kv_heads),
        },
    }


def statistics(shape: OpenVlaShape, seed: int = 0) -> dict[str, Any]:
    """Statistics of each data set. The gripper, the last number of an action of 7, stays as it is."""
    random, every = np.random.default_rng(seed), {}
    for name in shape.data_sets:
        numbers: dict[str, Any] = {}
        for kind, width in (("action", shape.action_dim), ("proprio", shape.state_dim or 8)):
            low, extent = random.uniform(-1.5, -0.5, width), random.uniform(0.5, 2, width)
            ends = {"q01": low, "q99": low + extent, "min": low - 0.5, "max": low + extent + 0.7}
            numbers[kind] = {end: [float(value) for value in values] for end, values in ends.items()}
        numbers["action"]["mask"] = [place != 6 for place in range(shape.action_dim)]
        every[name] = {**numbers, "num_transitions": 52970}
    return every


def processor(shape: OpenVlaShape) -> dict[str, Any]:
    """The published preprocessor_config.json, whose `tvf` values are rounded and win."""
    side = shape.image_size
    means, stds = [[0.485, 0.456, 0.406], [0.5] * 3], [[0.229, 0.224, 0.225], [0.5] * 3]
    rounded = [[0.484375, 0.455078125, 0.40625], [0.5] * 3], [[0.228515625, 0.2236328125, 0.224609375], [0.5] * 3]
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "processor_class": "PrismaticProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, side, side]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": means,
        "stds": stds,
        "tvf_crop_params": [{"output_size": [side, side]}] * 2,
        "tvf_do_letterbox": False,
        "tvf_letterbox_fill": None,
        "tvf_normalize_params": [
            {"mean": mean, "std": std, "inplace": False} for mean, std in zip(*rounded, strict=True)
        ],
        "tvf_resize_params": [{"antialias": True, "interpolation": 3, "max_size": None, "size": [side, side]}] * 2,
        "use_fused_vision_backbone": True,
    }


def sizes(shape: OpenVlaShape) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of all tensors, as the original's modules have them."""
    patches = (shape.image_size // 14) ** 2
    for name, width, ratio in zip(("featurizer", "fused_featurizer"), WIDTHS, (2.0, 1.7), strict=True):
        tower, inner = f"vision_backbone.{name}", int(width * ratio)
        yield f"{tower}.patch_embed.proj.weight", [width, 3, 14, 14]
        yield f"{tower}.patch_embed.proj.bias", [width]
        yield f"{tower}.pos_embed", [1, patches, width]
        if name == "featurizer":
            yield f"{tower}.cls_token", [1, 1, width]
            yield from [(f"{tower}.reg_token", [1, shape.registers, width])] if shape.registers else []
        # The last block and the last norm are in the file and of no use.
        for block in range(TOWER_DEPTH):
            own = f"{tower}.blocks.{block}"
            yield from linear(f"{own}.attn.qkv", width, 3 * width)
            yield from linear(f"{own}.attn.proj", width, width)
            yield from linear(f"{own}.mlp.fc1", width, inner)
            yield from linear(f"{own}.mlp.fc2", inner, width)
            for norm in ("norm1", "norm2"):
                yield from norm_of(f"{own}.{norm}", width)
            if name == "featurizer":
                yield from ((f"{own}.{scale}.scale_factor", [width]) for scale in ("ls1", "ls2"))
        yield from norm_of(f"{tower}.norm", width)
    both = sum(WIDTHS)
    for layer, ends in (("fc1", (both, 4 * both)), ("fc2", (4 * both, HIDDEN)), ("fc3", (HIDDEN, HIDDEN))):
        yield from linear(f"projector.{layer}", *ends)
    with torch.device("meta"):
        decoder = LlamaForCausalLM(LlamaConfig(**config(shape)["text_config"]))
    yield from ((f"language_model.{name}", [*tensor.shape]) for name, tensor in decoder.state_dict().items())
    if not shape.head:
        return
    wide = shape.action_dim * HIDDEN
    yield from norm_of("action_head.model.layer_norm1", wide)
    yield from linear("action_head.model.fc1", wide, HIDDEN)
    for block in range(shape.blocks):
        yield from norm_of(f"action_head.model.mlp_resnet_blocks.{block}.ffn.0", HIDDEN)
        yield from linear(f"action_head.model.mlp_resnet_blocks.{block}.ffn.1", HIDDEN, HIDDEN)
    yield from norm_of("action_head.model.layer_norm2", HIDDEN)
    yield from linear("action_head.model.fc2", HIDDEN, shape.action_dim)
    if shape.state_dim:
        yield from linear("proprio_projector.fc1", shape.state_dim, HIDDEN)
        yield from linear("proprio_projector.fc2", HIDDEN, HIDDEN)


def linear(name: str, inputs: int, outputs: int) -> list[tuple[str, list[int]]]:
    return [(f"{name}.weight", [outputs, inputs]), (f"{name}.bias", [outputs])]


def norm_of(name: str, width: int) -> list[tuple[str, list[int]]]:
    return [(f"{name}.weight", [width]), (f"{name}.bias", [width])]


def drawn(name: str, size: list[int]) -> torch.Tensor:
    """Random values: large enough that attention is far from uniform and actions exceed 1."""
    if name.endswith("bias"):
        return 0.1 * torch.randn(size)
    if len(size) == 1:
        return 1 + 0.2 * torch.randn(size)
    if "embed" in name or "token" in name:
        return 0.3 * torch.randn(size)
    values = 1.5 * torch.randn(size) * np.prod(size[1:]) ** -0.5
    return values.bfloat16() if name.startswith("action_head") else values


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama's kind, with the ids that the code of OpenVLA names."""
    letters = {chr(code): EMPTY + 1 + place for place, code in enumerate(range(33, 127))}
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": EMPTY, **byte_tokens(3), **letters}
    merges = [("▁", "p"), ("▁", "i"), ("▁", "t"), ("▁", "I")]
    vocabulary |= {"".join(pair): 400 + place for place, pair in enumerate(merges)}
    used = set(vocabulary.values())
    vocabulary |= {f"▁filler{number}": number for number in range(PAD) if number not in used}
    return with_specials(as_llama(byte_pairs(vocabulary, merges)), ("<unk>", "<s>", "</s>", "<PAD>"))
