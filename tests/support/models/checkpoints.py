"""Small random LLaVA checkpoints in Hugging Face format, as `save_pretrained` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

VOCAB = 384
IMAGE_TOKEN = 380
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for item in message['content'] if item['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for item in message['content'] if item['type'] == 'text' %}{{ item['text'] }} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """What the small checkpoints differ in."""

    image_size: int = 336
    num_layers: int = 6
    num_kv_heads: int = 4
    tied: bool = False
    feature_layer: int = -2


def make_checkpoint(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """A LLaVA checkpoint with random weights, tokenizer, processor and chat template."""
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": shape.image_size,
            "patch_size": 14,
            "initializer_factor": 4.0,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": shape.num_kv_heads,
            "vocab_size": VOCAB,
            "max_position_embeddings": 1024,
            # Large enough that attention is far from uniform and logits far from tied.
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=shape.feature_layer,
        vision_feature_select_strategy="default",
        tie_word_embeddings=shape.tied,
    )
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    size = shape.image_size
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size}).save_pretrained(
        folder
    )
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama's kind: prefix space, metaspace, byte fallback, BOS in front."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=IMAGE_TOKEN,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        show_progress=False,
    )
    text = "USER: ASSISTANT: What is in the picture? Describe the image. Which colour is the cup on the table?"
    backend.train_from_iterator([text, text.lower()], trainer)
    while backend.get_vocab_size() < IMAGE_TOKEN:
        backend.add_tokens([f"▁filler{backend.get_vocab_size()}"])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>", "<image>", "<pad>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
