"""Prompts with several pictures and text between them, as each family's own processor takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    Qwen2VLImageProcessorPil,
)

Size = tuple[int, int]

PIECES = ["Before:", "and after:", "What has changed?"]
SIZES: dict[str, list[Size]] = {
    "gqa-112": [(600, 400), (100, 300)],
    # Five groups and three
    "next-mistral": [(224, 224), (300, 150)],
    # 56 and 120 tokens
    "qwen": [(224, 200), (280, 336)],
    "qwen-tied": [(280, 336), (56, 28)],
    "qwen2-vl": [(224, 200), (280, 336)],
    "qwen3-vl": [(224, 200), (280, 336)],
}
BUDGETS = {
    "gqa-112": ("retain-64", "retain-192", "retain-64+compact", "retain-32+no-sanitizer+visual-keys"),
    "next-mistral": ("retain-320", "retain-160+raster"),
    "qwen": ("prune-66.7", "prune-88.9", "prune-77.8+no-sanitizer"),
    "qwen-tied": ("prune-66.7", "prune-88.9"),
    "qwen2-vl": ("prune-77.8", "prune-88.9"),
    "qwen3-vl": ("prune-77.8",),
}


def images_of(name: str, photo: Image.Image) -> list[Image.Image]:
    """Two different pictures."""
    sizes = SIZES[name]
    return [
        photo.resize(sizes[0]),
        photo.transpose(Image.Transpose.ROTATE_180).crop((50, 0, 500, 300)).resize(sizes[1]),
    ]


def reference_inputs(
    name: str, folder: Path, images: Sequence[Image.Image], pieces: str | list[str]
) -> dict[str, Any]:
    """What the family's processor gives."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = rendered(tokenizer, name, len(images), pieces)
    if name == "next-mistral":
        kind = LlavaNextImageProcessorPil.from_pretrained(folder)
        facts = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor = LlavaNextProcessor(kind, tokenizer, **facts)
        return dict(processor(text=text, images=list(images), return_tensors="pt"))
    if name == "gqa-112":
        ids = tokenizer(text.replace("<image>", "<image>" * 64), return_tensors="pt")
        return {**ids, **CLIPImageProcessorPil.from_pretrained(folder)(list(images), return_tensors="pt")}
    pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)(list(images), return_tensors="pt")
    parts = text.split("<|image_pad|>")
    counts = [int(grid.prod()) // 4 for grid in pictures["image_grid_thw"]]
    text = parts[0] + "".join("<|image_pad|>" * n + part for n, part in zip(counts, parts[1:], strict=True))
    ids = tokenizer(text, return_tensors="pt")
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {**ids, "mm_token_type_ids": (ids["input_ids"] == token).int(), **pictures}


def rendered(tokenizer: Any, name: str, images: int, pieces: str | list[str]) -> str:
    """The conversation; LLaVA's template writes images first, so that those within text are written there."""
    content: list[dict[str, str]] = []
    if isinstance(pieces, str):
        content = [*[{"type": "image"}] * images, {"type": "text", "text": pieces}]
    elif name.startswith("qwen"):
        for piece in pieces:
            content += [{"type": "text", "text": piece}, {"type": "image"}]
        content.pop()
    else:
        content = [{"type": "text", "text": "<image>".join(pieces)}]
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return text
