"""The shape, tokenizer and files of the pocket model of any resolution: a Qwen3-VL of 8 million parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from pocket_training.chunks import IN_CHUNKS
from pocket_training.lessons import description, draw_questions
from pocket_training.model import Dialogue
from pocket_training.stages import FIRST_LAYERS, MEASURED_KINDS
from pocket_training.tokenizer import VOCABULARY, train_tokenizer
from sinkprune.demo.questions import VARIED_KINDS
from sinkprune.demo.scenes import MOST_TOKENS, UNIT, compose_varied

MERGE = 2
PATCH = UNIT // MERGE
_LAYERS = 24
"""Layers of the decoder. With fewer, a pruning stage would come before the third, which gets DeepStack features."""
_HEAD = 32
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_END, _IMAGE, _VIDEO = (_SPECIAL.index(token) for token in ("<|im_end|>", "<|image_pad|>", "<|video_pad|>"))
QWEN_DIALOGUE = Dialogue(
    "<|im_start|>user\n<|vision_start|>", "<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n", _END, 0
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def new_model() -> Qwen3VLForConditionalGeneration:
    """Return the initialised model."""
    config = Qwen3VLConfig(
        vision_config={
            "depth": 6,
            "hidden_size": 160,
            "intermediate_size": 480,
            "num_heads": 160 // _HEAD,
            "out_hidden_size": 128,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "num_position_embeddings": 16**2,
            "deepstack_visual_indexes": [1, 2, 3],
        },
        text_config={
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 128 // _HEAD,
            "num_key_value_heads": 128 // _HEAD,
            "head_dim": _HEAD,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1024,
            "initializer_range": 0.06,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": _END,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        image_token_id=_IMAGE,
        video_token_id=_VIDEO,
        vision_start_token_id=_SPECIAL.index("<|vision_start|>"),
        vision_end_token_id=_SPECIAL.index("<|vision_end|>"),
        tie_word_embeddings=True,
        attn_implementation=IN_CHUNKS,
    )
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        _start_tower(model.model.visual)
        _start_decoder(model.model.language_model)
    return model


def _start_tower(tower: Any) -> None:
    """Initialise attention to near and alike patches, as in `model`, and other weights as CLIP does.

    DeepStack starts at zero, so that the decoder's first layers see no noise.
    """
    side, width, depth = tower.num_grid_per_side, tower.config.hidden_size, tower.config.depth
    quarter = width // 4
    angles = torch.arange(side)[:, None] * 0.05 ** (torch.arange(quarter) / quarter)
    wave = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = wave[:, None].expand(-1, side, -1), wave[None].expand(side, -1, -1)
    tower.pos_embed.weight.copy_(torch.cat([rows, columns], 2).flatten(0, 1))
    nn.init.normal_(tower.patch_embed.proj.weight, std=0.03)
    inner, outer = 2 * width**-0.5 * (2 * depth) ** -0.5, 2 * width**-0.5
    for block in tower.blocks:
        queries, keys, values = block.attn.qkv.weight.chunk(3)
        nn.init.normal_(queries, std=0.09)
        keys.copy_(queries)
        nn.init.normal_(values, std=inner)
        nn.init.normal_(block.attn.proj.weight, std=outer)
        nn.init.normal_(block.mlp.linear_fc1.weight, std=2 * (2 * width) ** -0.5)
        nn.init.normal_(block.mlp.linear_fc2.weight, std=inner)
    # Visual tokens as long as embeddings of words.
    for merger in (tower.merger, *tower.deepstack_merger_list):
        nn.init.normal_(merger.linear_fc1.weight, std=(4 * width) ** -0.5)
        nn.init.normal_(merger.linear_fc2.weight, std=0.15 * (4 * width) ** -0.5)
    for merger in tower.deepstack_merger_list:
        nn.init.zeros_(merger.linear_fc2.weight)


def _start_decoder(decoder: Any) -> None:
    """Initialise attention to tokens alike, as in `model`. Layers that are trained later pass their input on."""
    nn.init.normal_(decoder.embed_tokens.weight, std=0.1)
    for number, layer in enumerate(decoder.layers):
        nn.init.normal_(layer.self_attn.q_proj.weight, std=0.08)
        layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)
        # With gains of 1, no logit exceeds 5.7: too little to find one token of hundreds.
        nn.init.constant_(layer.self_attn.q_norm.weight, 1.25)
        nn.init.constant_(layer.self_attn.k_norm.weight, 1.25)
        scale = (2 * len(FIRST_LAYERS)) ** -0.5 if number in FIRST_LAYERS else 0.0
        layer.self_attn.o_proj.weight *= scale
        layer.mlp.down_proj.weight *= scale


def save(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `model` as an fp16 checkpoint in Hugging Face format."""
    copy = Qwen3VLForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = [_END, 0]
    copy.half().save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
    Qwen2VLImageProcessorPil(
        min_pixels=UNIT**2,
        max_pixels=MOST_TOKENS * UNIT**2,
        patch_size=PATCH,
        merge_size=MERGE,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)


def new_tokenizer(scenes: int = 3000) -> Tokenizer:
    """Return a byte-level BPE tokenizer, trained on the questions about `scenes` training scenes."""
    return train_tokenizer(_texts(scenes), _SPECIAL)


def _texts(scenes: int) -> Iterator[str]:
    yield from 100 * ["system", "user\n", "assistant\n"]
    for index in range(scenes):
        scene = compose_varied("training", index)
        for question in (description(scene), *draw_questions(scene, Random(index), 10, MEASURED_KINDS, VARIED_KINDS)):
            yield question.prompt
            yield f" {question.answers[0]}"
