"""Small random checkpoints of Qwen2-VL, 2.5-VL and 3-VL in Hugging Face format, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from support.models.checkpoints import add_specials, save_random_model, small_decoder
from support.models.peer_shapes import MARKS

CALL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Not special in the published tokenizers."""
TOOL_TEMPLATE = r"""
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}{%- if 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- macro content_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) + '\n\n' }}{%- endif %}
    {{- "# Tools\n\nYou may call the functions in <tools></tools>:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nWrite each call as a JSON object within <tool_call></tool_call>:\n<tool_call>\n" }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + text_of(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + content_of(message.content) + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + text_of(message.content) }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content_of(message.content) + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


SPECIALS = {
    370: "<|endoftext|>",
    371: "<|im_start|>",
    372: "<|im_end|>",
    373: "<|vision_start|>",
    374: "<|vision_end|>",
    375: "<|image_pad|>",
    376: "<|video_pad|>",
}
ENDS = {"bos_token_id": 370, "eos_token_id": 372}
IMAGE_TOKEN = 375
VIDEO_TOKEN = 376
# The published checkpoints' template, for messages of text and images.
TEMPLATE = (
    "{% set count = namespace(images=0, clips=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "<|im_end|>\n{% else %}{% for item in message['content'] %}"
    "{% if item['type'] == 'image' or 'image' in item or 'image_url' in item %}"
    "{% set count.images = count.images + 1 %}{% if add_vision_id %}Picture {{ count.images }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif item['type'] == 'video' or 'video' in item %}"
    "{% set count.clips = count.clips + 1 %}{% if add_vision_id %}Video {{ count.clips }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in item %}{{ item['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes what the template of Qwen2-VL's and Qwen2.5-VL's checkpoints writes."""


@dataclass(frozen=True)
class QwenShape:
    """What the small checkpoints differ in."""

    kind: str = "qwen2_5_vl"
    depth: int = 4
    full_attention_blocks: tuple[int, ...] = (1, 3)
    """With (1, 3) of 4 blocks the penultimate, whose attention is the salience, is windowed as in the real model."""
    num_layers: int = 6
    num_kv_heads: int = 2
    tied: bool = False
    most_tokens: int = 480
    """Of an image; 480 as in the paper's runs."""
    deepstack_blocks: tuple[int, ...] = (0, 1, 2)
    """Of Qwen3-VL alone, whose decoder needs 24 layers to be cut behind the third."""
    merge_size: int = 2
    """Patches along a side of a merged token."""
    num_heads: int = 4
    """Of the decoder: 1, 2 or 4."""
    tools: bool = False
    """Whether the chat template has tools. Their definitions make prompts long."""

    @property
    def token_side(self) -> int:
        """Pixels along a side of a merged token."""
        return (16 if self.kind == "qwen3_vl" else 14) * self.merge_size

    @property
    def min_pixels(self) -> int:
        """One token."""
        return self.token_side**2

    @property
    def max_pixels(self) -> int:
        """Those of the most tokens."""
        return self.most_tokens * self.token_side**2


def make_qwen_checkpoint(folder: Path, shape: QwenShape, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, tokenizer, processor and chat template."""
    wide, narrow = ({"hidden_size": width, "intermediate_size": 96, "out_hidden_size": 64} for width in (64, 48))
    windows = {"fullatt_block_indexes": list(shape.full_attention_blocks), "window_size": 4 * shape.token_side}
    # A table of 5 x 5, smaller than some pictures and larger than others
    table = {"num_position_embeddings": 25, "deepstack_visual_indexes": list(shape.deepstack_blocks)}
    towers = {
        "qwen2_5_vl": {**wide, **windows},
        "qwen2_vl": {"embed_dim": 48, "mlp_ratio": 2, "hidden_size": 64},
        "qwen3_vl": {**narrow, **table},
    }
    sections: dict[str, Any] = {"mrope_section": [part * 4 // shape.num_heads for part in (2, 3, 3)]}
    if shape.kind == "qwen3_vl":
        sections = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = AutoConfig.for_model(
        shape.kind,
        vision_config={
            "depth": shape.depth,
            "num_heads": 4,
            "initializer_range": 0.1,
            "spatial_merge_size": shape.merge_size,
            **towers[shape.kind],
        },
        text_config={
            **small_decoder(shape.num_layers, shape.num_kv_heads),
            "num_attention_heads": shape.num_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections},
            **({"head_dim": 32, "tie_word_embeddings": shape.tied} if shape.kind == "qwen3_vl" else {}),
            **({"max_position_embeddings": 4096} if shape.tools else {}),
            **ENDS,
        },
        **MARKS,
        tie_word_embeddings=shape.tied,
    )
    template = TOOL_TEMPLATE if shape.tools or shape.kind == "qwen3_vl" else TEMPLATE
    save_random_model(folder, config, qwen_tokenizer(shape.tools), template, [372, 370], seed)
    own: dict[str, Any] = {"min_pixels": shape.min_pixels, "max_pixels": shape.max_pixels}
    if shape.kind == "qwen3_vl":
        own |= {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    Qwen2VLImageProcessorPil(**own, merge_size=shape.merge_size).save_pretrained(folder)
    if shape.kind == "qwen3_vl":
        settings = {"size": {"shortest_edge": 4096, "longest_edge": 1 << 22}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def qwen_tokenizer(
    tools: bool = False, specials: Mapping[int, str] = MappingProxyType(SPECIALS), **roles: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer of Qwen's kind: bytes, no BOS, special tokens behind the words, and with `tools` those of calls."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=min(specials), initial_alphabet=alphabet, show_progress=False)
    text = "system user assistant What is in the picture? Describe the image. Which colour is the cup on the table?"
    backend.train_from_iterator([text, text.lower(), *[TOOL_TEMPLATE] * tools], trainer)
    while backend.get_vocab_size() < min(specials):
        backend.add_tokens([f" filler{backend.get_vocab_size()}"])
    add_specials(backend, specials.values())
    assert {backend.token_to_id(token): token for token in specials.values()} == specials
    if tools:
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in CALL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", **roles
    )
