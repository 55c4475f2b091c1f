"""Prompts with images or a clip and text between them, as each family's own processor makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    Qwen2VLImageProcessorPil,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from sinkprune import Pipeline
from sinkprune.runtime.media.clip import SampledFrames
from support.models.qwen_checkpoints import VIDEO_TOKEN
from support.models.small_models import NEXT_SHAPES
from support.references.pruned_prompts import seconds_per_patch
from support.references.steps import QUESTION, patch_grid

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
    """Return what the family's processor gives for images: those of the checkpoint `name` in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = rendered(tokenizer, name, len(images), pieces)
    if name in NEXT_SHAPES:
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


def clip_ids(
    pipe: Pipeline, folder: Path, clip: SampledFrames, fps: float, pieces: str | list[str] = QUESTION
) -> list[int]:
    """Return the ids that the model's own processor gives a prompt about a clip of `fps` frames a second."""
    tokenizer, grid = AutoTokenizer.from_pretrained(folder), torch.tensor([patch_grid(pipe, clip)])
    family, written = pipe.bundle.manifest.family, "<|video_pad|>" * (int(grid.prod()) // 4)
    if family == "qwen3-vl":
        written = _with_times(clip, grid, fps)
    # The published template writes <|video_pad|> where a clip stands, and nothing else is different.
    text = rendered(tokenizer, family, 1, pieces).replace("<|image_pad|>", written)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _with_times(clip: SampledFrames, grid: torch.Tensor, fps: float) -> str:
    """Return what the processor of Qwen3-VL writes in the place of a clip's token."""
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_token, processor.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    indices = np.array([round(second * fps) for second in clip.seconds])
    metadata = [SimpleNamespace(fps=fps, frames_indices=indices)]
    text: str = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": metadata}, 0)
    return text


def clip_inputs(model: Any, pipe: Pipeline, folder: Path, clip: SampledFrames, fps: float) -> dict[str, Any]:
    """Return the inputs of transformers' `model` for a question about a clip of `fps` frames a second."""
    ids = torch.tensor([clip_ids(pipe, folder, clip, fps)])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == VIDEO_TOKEN).int(),
        "pixel_values_videos": torch.from_numpy(pipe.family.inputs(clip)["pixel_values"]).flatten(0, 1),
        "video_grid_thw": torch.tensor([patch_grid(pipe, clip)]),
        **seconds_per_patch(model, clip),
    }


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
