"""The pocket robot's shape, tokenizer and files: a pi0 of 3 million parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PI0Config, PI0ForConditionalGeneration, PreTrainedTokenizerFast

from pocket_training.tokenizer import train_tokenizer
from sinkprune.demo.robot_table import CAMERA_NAMES, SIDE
from sinkprune.demo.scenes import COLOURS, SHAPES

PATCH = 8
GRID = SIDE // PATCH
CAMERAS = len(CAMERA_NAMES)
CHUNK = 8
"""Actions of a chunk."""
STATE, ACTION = 2, 3
"""Numbers of a state and of an action. The model pads both to three."""
_WIDTH, _HEAD, _LAYERS, _VOCABULARY = 128, 32, 8, 320
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<image>")
BOS, IMAGE = 2, 3


class Statistics(NamedTuple):
    """Means and standard deviations of the training's states and actions."""

    state_mean: tuple[float, ...]
    state_std: tuple[float, ...]
    actions_mean: tuple[float, ...]
    actions_std: tuple[float, ...]


def new_model() -> PI0ForConditionalGeneration:
    """Return the initialised model."""
    decoder = {
        "model_type": "gemma",
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 512,
        # The first visual tokens are 288 positions before the instruction.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "initializer_range": 0.06,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": BOS,
    }
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": {**decoder, "hidden_size": _WIDTH, "intermediate_size": 256},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": _WIDTH,
                "intermediate_size": 384,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "image_size": SIDE,
                "patch_size": PATCH,
                "vision_use_head": False,
                "projection_dim": _WIDTH,
            },
            "projection_dim": _WIDTH,
            "hidden_size": _WIDTH,
            "image_token_id": IMAGE,
        },
        dit_config={**decoder, "hidden_size": 96, "intermediate_size": 256},
        chunk_size=CHUNK,
        max_state_dim=ACTION,
        max_action_dim=ACTION,
        num_inference_steps=10,
        # PyTorch's own attention is twice as slow in bf16 as its matrix products.
        attn_implementation="eager",
    )
    model = PI0ForConditionalGeneration(config)
    with torch.no_grad():
        _start_tower(model.model.vlm.vision_tower)
        nn.init.normal_(model.model.vlm.multi_modal_projector.linear.weight, std=_WIDTH**-0.5)
        _start_decoder(model.model.vlm.language_model)
        _start_decoder(model.model.dit)
        nn.init.normal_(model.action_out_proj.weight, std=0.02)
    return model


def position_waves(width: int) -> torch.Tensor:
    """Return [V,width] fp32: sines and cosines of each patch's row and column."""
    angles = torch.arange(GRID)[:, None] * 0.05 ** (torch.arange(width // 4) / (width // 4))
    wave = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = wave[:, None].expand(-1, GRID, -1), wave[None].expand(GRID, -1, -1)
    return torch.cat([rows, columns], 2).flatten(0, 1)


def _start_tower(tower: Any) -> None:
    """Initialise attention to near and alike patches, as in the pocket LLaVA."""
    width, layers = tower.config.hidden_size, tower.encoder.layers
    tower.embeddings.position_embedding.weight.copy_(position_waves(width))
    nn.init.normal_(tower.embeddings.patch_embedding.weight, std=0.1)
    inner = width**-0.5 * (2 * len(layers)) ** -0.5
    for layer in layers:
        nn.init.normal_(layer.self_attn.q_proj.weight, std=0.09)
        layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
        nn.init.normal_(layer.self_attn.v_proj.weight, std=width**-0.5)
        nn.init.normal_(layer.self_attn.out_proj.weight, std=inner)
        nn.init.normal_(layer.mlp.fc1.weight, std=width**-0.5)
        nn.init.normal_(layer.mlp.fc2.weight, std=inner)


def _start_decoder(decoder: Any) -> None:
    """Initialise two of four heads to attend to alike rows, as in the pocket LLaVA, and small residuals."""
    nn.init.normal_(decoder.embed_tokens.weight, std=0.1)
    for layer in decoder.layers:
        attention = layer.self_attn
        nn.init.normal_(attention.k_proj.weight, std=0.07)
        nn.init.normal_(attention.q_proj.weight, std=0.07)
        for head in range(2):
            attention.q_proj.weight[head * _HEAD : (head + 1) * _HEAD] = attention.k_proj.weight
        for projection in (attention.o_proj, layer.mlp.down_proj):
            projection.weight *= (2 * len(decoder.layers)) ** -0.5


def save(model: PI0ForConditionalGeneration, tokenizer: Tokenizer, statistics: Statistics, folder: Path) -> None:
    """Write `model` as an fp16 checkpoint in Hugging Face format.

    transformers' own processor class needs torchvision, so its files are written here.
    """
    copy = PI0ForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    copy.half().save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(folder)
    pictures = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_pad": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_processor_type": "PI0ImageProcessor",
        "image_seq_length": GRID**2,
        "image_std": [0.5] * 3,
        "pad_size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"max_height": SIDE, "max_width": SIDE},
    }
    _write(folder / "preprocessor_config.json", pictures)
    # transformers reads the nested fields; the file above is for programs that read pictures only.
    whole = {
        **statistics._asdict(),
        "cameras": CAMERA_NAMES,
        "chunk_size": CHUNK,
        "max_state_dim": ACTION,
        "processor_class": "PI0Processor",
        "image_processor": pictures,
    }
    _write(folder / "processor_config.json", whole)


def _write(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def new_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer with one token for each word of an instruction."""
    texts = (f"pick the {colour} {shape}\n" for colour in COLOURS for shape in SHAPES)
    return train_tokenizer(texts, _SPECIAL, vocabulary=_VOCABULARY)
