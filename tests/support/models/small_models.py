"""The small checkpoints that tests share, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.models.checkpoints import GELU_TANH, NextShape, Shape, make_checkpoint, make_llava_next_checkpoint
from support.models.internvl_checkpoints import InternVLShape, make_internvl_checkpoint
from support.models.openvla_checkpoints import OpenVlaShape, make_openvla_checkpoint
from support.models.pi0_checkpoints import (
    PaliGemmaShape,
    Pi0Shape,
    make_paligemma_checkpoint,
    make_pi0_checkpoint,
    make_pi05_checkpoint,
)
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint

SHAPES = {"mha-336": Shape(), "gqa-112": Shape(image_size=112, num_kv_heads=2, num_layers=8, tied=True)}

_SMALL = Shape(image_size=112, num_kv_heads=2)
LLAVA_VARIANTS = {
    # BakLLaVA: the window is the most positions.
    "mistral": replace(_SMALL, decoder="mistral", text={"sliding_window": 512}),
    "qwen2": replace(_SMALL, decoder="qwen2", text={"sliding_window": 32, "use_sliding_window": False}),
    "linear": replace(
        _SMALL, text={"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    ),
    # llava-interleave: patches leave out an edge.
    "siglip": replace(_SMALL, image_size=120, decoder="qwen2", tied=True, siglip=True, feature_layer=-1),
    "siglip-2": replace(_SMALL, siglip=True),
    "list": replace(_SMALL, feature_layer=[-2]),
}
"""Checkpoints of LLaVA with other towers and decoders than LLaVA-1.5."""

QWEN_SHAPES = {
    "qwen": QwenShape(),
    "qwen-tied": QwenShape(depth=3, full_attention_blocks=(1,), num_layers=8, num_kv_heads=1, tied=True),
    "qwen2-vl": QwenShape(kind="qwen2_vl", num_layers=7),
    "qwen3-vl": QwenShape(kind="qwen3_vl", num_layers=24),
}

TOOL_SHAPES = {
    "qwen-tools": QwenShape(depth=3, full_attention_blocks=(1,), num_layers=8, num_kv_heads=1, tied=True, tools=True)
}
"""With Qwen3-VL's kind of chat template. Its decoder would need 24 layers."""

CLIPS_IN_ONE_PIECE = [name for name, shape in QWEN_SHAPES.items() if shape.kind != "qwen3_vl"]
"""Those that have no text between the frames of a clip."""

_NEXT_MISTRAL = NextShape(decoder="mistral", num_layers=8, num_kv_heads=2, text={"sliding_window": None})
NEXT_SHAPES = {"next": NextShape(), "next-mistral": _NEXT_MISTRAL}


PI0_SHAPES = {
    "pi0": Pi0Shape(),
    "pi0-deep": Pi0Shape(image_size=84, num_layers=18, num_heads=2, chunk=1),
    "pi0-bare": Pi0Shape(image_size=140, chunk=12, state_dim=32, action_dim=32, statistics=False),
    "pi0-few-tokens": Pi0Shape(image_size=56, num_heads=1, chunk=3),
}


PI05_SHAPES = {
    "pi0.5": Pi0Shape(),
    "pi0.5-bare": Pi0Shape(image_size=84, num_layers=18, num_heads=2, chunk=1, statistics=False),
}

INTERNVL_SHAPES = {
    "internvl": InternVLShape(),
    # Settings of the 38B's tower, and others that no published checkpoint has.
    "internvl3.5": InternVLShape(
        image_size=224,
        ratio=0.25,
        num_layers=7,
        num_kv_heads=1,
        tied=True,
        text={"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
        vision={"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False, "hidden_act": GELU_TANH},
        tiles=(2, 6),
    ),
}
PALIGEMMA_SHAPES = {
    "paligemma": PaliGemmaShape(),
    # The image token follows the table, and the head has weights of its own, in no published checkpoint.
    "paligemma-odd": PaliGemmaShape(
        image_size=98, num_layers=7, num_heads=6, num_kv_heads=3, vocab_size=320, tied=False, bias=True
    ),
}
OPENVLA_SHAPES = {
    "openvla-oft": OpenVlaShape(),
    # BRIDGE's numbers.
    "openvla-oft-bridge": OpenVlaShape(
        image_size=84, num_layers=10, num_kv_heads=2, chunk=5, state_dim=7, blocks=1, registers=0, prefix="module."
    ),
    "openvla-oft-stateless": OpenVlaShape(image_size=84, state_dim=0),
}
OPENVLA_TOKEN_SHAPES = {
    "openvla": OpenVlaShape(head=False, state_dim=0),
    "openvla-gqa": OpenVlaShape(image_size=84, num_layers=10, num_kv_heads=2, head=False, state_dim=0, action_dim=5),
}


_MAKERS: tuple[tuple[Callable[..., Path], Mapping[str, Any]], ...] = (
    (make_checkpoint, {**SHAPES, **LLAVA_VARIANTS}),
    (make_llava_next_checkpoint, NEXT_SHAPES),
    (make_qwen_checkpoint, {**QWEN_SHAPES, **TOOL_SHAPES}),
    (make_pi0_checkpoint, PI0_SHAPES),
    (make_pi05_checkpoint, PI05_SHAPES),
    (make_internvl_checkpoint, INTERNVL_SHAPES),
    (make_paligemma_checkpoint, PALIGEMMA_SHAPES),
    (make_openvla_checkpoint, {**OPENVLA_SHAPES, **OPENVLA_TOKEN_SHAPES}),
)


def make_small_model(name: str, folder: Path) -> None:
    """Write the checkpoint of that name into the new `folder`."""
    folder.mkdir()
    [(make, shape)] = [(make, shapes[name]) for make, shapes in _MAKERS if name in shapes]
    make(folder, shape)
