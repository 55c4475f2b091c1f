"""Small random LLaVA and LLaVA-NeXT checkpoints in Hugging Face format, as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessorPil,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)

from support.models.peer_shapes import sizes

VOCAB = 384
IMAGE_TOKEN = 380
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'] | upper }}: {% endif %}"
    "{% for item in message['content'] if item['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""Writes what the template of llava-1.5-7b-hf and llava-v1.6-vicuna-7b-hf writes."""
MISTRAL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}<<SYS>>\n{{ message['content'][0]['text'] }}\n<</SYS>>\n\n"
    "{% elif message['role'] == 'user' %}[INST] "
    "{% for item in message['content'] if item['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }}{% endfor %} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'][0]['text'] }}<\\s> "
    "{% else %}{{ raise_exception('no role ' ~ message['role']) }}{% endif %}{% endfor %}"
)
"""Writes what the template of llava-v1.6-mistral-7b-hf writes."""

GELU_TANH = "gelu_pytorch_tanh"
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_act": GELU_TANH, "vision_use_head": False}
SIDE = 112
"""Pixels along a side of LLaVA-NeXT's tiles."""
PINPOINTS = [[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]]
"""Those of the published checkpoints, for tiles of `SIDE` pixels."""


@dataclass(frozen=True)
class Shape:
    """What the small checkpoints of LLaVA differ in."""

    image_size: int = 336
    num_layers: int = 6
    num_kv_heads: int = 4
    tied: bool = False
    feature_layer: int | list[int] = -2
    decoder: str = "llama"
    text: Mapping[str, Any] = field(default_factory=dict)
    """What the decoder's configuration has in addition."""
    siglip: bool = False


NextShape = Shape
"""Those of LLaVA-NeXT, whose tiles have `SIDE` pixels."""


def make_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write a LLaVA checkpoint with random weights, tokenizer, processor and chat template."""
    config = LlavaConfig(
        vision_config={**_vision(shape.image_size), **(_SIGLIP if shape.siglip else {})},
        text_config=_text(shape),
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=shape.feature_layer,
        vision_feature_select_strategy="full" if shape.siglip else "default",
        tie_word_embeddings=shape.tied,
    )
    save_random_model(folder, config, tokenizer(), TEMPLATE, 2, seed)
    if shape.siglip:
        side = {"height": shape.image_size, "width": shape.image_size}
        SiglipImageProcessorPil(size=side).save_pretrained(folder)
    else:
        CLIPImageProcessorPil(**_sizes(shape.image_size)).save_pretrained(folder)
    return folder


def make_llava_next_checkpoint(folder: Path, shape: NextShape, seed: int = 0) -> Path:
    """Write a LLaVA-NeXT checkpoint with random weights, tokenizer, processor and chat template."""
    config = LlavaNextConfig(
        vision_config=_vision(SIDE),
        text_config=_text(shape),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=PINPOINTS,
    )
    template = MISTRAL_TEMPLATE if shape.decoder == "mistral" else TEMPLATE
    save_random_model(folder, config, tokenizer(), template, 2, seed)
    LlavaNextImageProcessorPil(**_sizes(SIDE), image_grid_pinpoints=PINPOINTS).save_pretrained(folder)
    return folder


def save_random_model(
    folder: Path,
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    stop: int | Sequence[int],
    seed: int,
    moved: Sequence[str] = (),
) -> None:
    """Write a model of `config` with random weights, its tokenizer, chat template and stop tokens.

    Parameters with one of `moved` in their names are not as at the start of a training, such as 0 or 1.
    """
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif any(part in name for part in moved):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.generation_config.eos_token_id = stop
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def small_decoder(num_layers: int, num_kv_heads: int) -> dict[str, Any]:
    """Return the shape that the decoders of all small checkpoints have."""
    return {
        **sizes(64, 160, num_layers, 4, num_kv_heads),
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        # Large enough that attention is far from uniform and logits far from tied.
        "initializer_range": 0.2,
    }


def _text(shape: Shape) -> dict[str, Any]:
    return {"model_type": shape.decoder, **small_decoder(shape.num_layers, shape.num_kv_heads), **shape.text}


def _vision(image_size: int) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        **sizes(64, 128, 4, 4),
        "image_size": image_size,
        "patch_size": 14,
        "initializer_factor": 4.0,
    }


def _sizes(size: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama's kind, of tokens that it learns."""
    backend = as_llama(Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)))
    trainer = trainers.BpeTrainer(
        vocab_size=IMAGE_TOKEN, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens()], show_progress=False
    )
    text = "USER: ASSISTANT: What is in the picture? Describe the image. Which colour is the cup on the table?"
    backend.train_from_iterator([text, text.lower()], trainer)
    while backend.get_vocab_size() < IMAGE_TOKEN:
        backend.add_tokens([f"▁filler{backend.get_vocab_size()}"])
    return with_specials(backend, ("<unk>", "<s>", "</s>", "<image>", "<pad>"))


def byte_tokens(first: int = 0) -> dict[str, int]:
    """The tokens of all bytes, with numbers from `first` on."""
    return {f"<0x{byte:02X}>": first + byte for byte in range(256)}


def byte_pairs(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """A tokenizer of Llama's and Gemma's kind: what is not in the vocabulary becomes bytes."""
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def add_specials(backend: Tokenizer, specials: Iterable[str], first: str = "") -> None:
    """Add special tokens, of which `first` begins a text."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    if first:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A $B", special_tokens=[(first, backend.token_to_id(first))]
        )


def as_llama(backend: Tokenizer) -> Tokenizer:
    """Let a tokenizer put a space before a text, as older ones of Llama do, and read bytes."""
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def with_specials(backend: Tokenizer, specials: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with special tokens: `<unk>`, `<s>`, which begins a text, `</s>`, and the last, which pads."""
    add_specials(backend, specials, "<s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=specials[-1]
    )
