"""Prompts with images or a clip and text between them, as each family's own processor makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaProcessor,
    PaliGemmaProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from sinkprune import Pipeline
from sinkprune.runtime.media.frame import SampledFrames
from support.models.qwen_checkpoints import IMAGE_TOKEN, VIDEO_TOKEN
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
    return processed(name, folder, [question(pieces, ["image"] * len(images))], images)


def clip_ids(pipe: Pipeline, folder: Path, clip: SampledFrames, fps: float) -> list[int]:
    """Return the ids that the model's own processor gives a prompt about a clip of `fps` frames a second."""
    inputs = processed(
        pipe.bundle.manifest.family, folder, [question(QUESTION, ["video"])], (), clips_of(pipe, clip, fps)
    )
    return inputs["input_ids"][0].tolist()


def question(pieces: str | list[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the user's message of `pieces` around an "image" or a "video" for each of `kinds`, or after all."""
    texts = [*[""] * len(kinds), pieces] if isinstance(pieces, str) else pieces
    content: list[dict[str, str]] = []
    for text, kind in zip(texts, [*kinds, ""], strict=True):
        content += [{"type": "text", "text": text}] * bool(text) + [{"type": kind}] * bool(kind)
    return {"role": "user", "content": content}


def clips_of(pipe: Pipeline, clip: SampledFrames, fps: float) -> dict[str, Any]:
    """Return what the video processor gives for a clip of `fps` frames a second; of Qwen's, without the pixels."""
    if pipe.bundle.manifest.family == "internvl":
        return {"pixel_values_videos": [torch.from_numpy(pipe.family.inputs(clip)["pixel_values"])]}
    indices = np.array([round(second * fps) for second in clip.seconds])
    metadata = SimpleNamespace(fps=fps, frames_indices=indices)
    return {"video_grid_thw": torch.tensor([patch_grid(pipe, clip)]), "video_metadata": [metadata]}


def processed(
    name: str,
    folder: Path,
    messages: list[dict[str, Any]],
    images: Sequence[Image.Image],
    clips: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return what the processor of a family or a small checkpoint gives for a conversation and its images.

    `clips` are those of `clips_of`. Qwen's processors need torchvision, so theirs is put together of its parts.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name.startswith("paligemma"):
        # The processor writes pictures before the text, and BOS and the end of the line around it.
        said = "".join(part["text"] for part in messages[0]["content"] if part["type"] == "text")
        processor = PaliGemmaProcessor(SiglipImageProcessorPil.from_pretrained(folder), tokenizer)
        return dict(processor(images=[[*images]], text=["<image>" * len(images) + said], return_tensors="pt"))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    given = {"images": list(images)} if images else {}
    if name.startswith("internvl"):
        return _of_internvl(tokenizer, folder, text, list(images), clips)
    if not name.startswith("qwen"):
        clip_or_siglip = SiglipImageProcessorPil if name.startswith("siglip") else CLIPImageProcessorPil
        kind, pixels = (
            (LlavaNextProcessor, LlavaNextImageProcessorPil)
            if name in NEXT_SHAPES
            else (LlavaProcessor, clip_or_siglip)
        )
        facts = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        return dict(kind(pixels.from_pretrained(folder), tokenizer, **facts)(text=text, **given, return_tensors="pt"))
    kind = Qwen3VLProcessor if name == "qwen3-vl" else Qwen2_5_VLProcessor
    processor = kind.__new__(kind)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    pictures = processor.image_processor(**given, return_tensors="pt") if images else {}
    seen = len(images), len(clips.get("video_metadata", ()))
    ids = tokenizer(_replaced(processor, text, pictures, clips, seen), return_tensors="pt")
    return {**ids, "mm_token_type_ids": (ids["input_ids"] == IMAGE_TOKEN).int(), **pictures}


def _of_internvl(
    tokenizer: Any, folder: Path, text: str, images: list[Image.Image], clips: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the same of InternVLProcessor, which needs torchvision too. Pixels are those of images, or of clips."""
    processor = InternVLProcessor.__new__(InternVLProcessor)
    processor.image_processor = GotOcr2ImageProcessorPil.from_pretrained(folder)
    processor.tokenizer, processor.video_processor = tokenizer, SimpleNamespace()
    for role in ("start_image_token", "end_image_token", "video_token"):
        setattr(processor, role, getattr(tokenizer, role))
    processor.image_token = tokenizer.context_image_token
    processor.image_seq_length = json.loads((folder / "config.json").read_text())["image_seq_length"]
    options = {**processor.images_kwargs, "return_tensors": "pt"}
    pictures = processor.image_processor(images, **options) if images else {}
    videos: Sequence[Any] = clips.get("pixel_values_videos", ())
    texts = _replaced(processor, text, pictures, {"pixel_values_videos": videos}, (len(images), len(videos)))
    pixels = pictures["pixel_values"] if images else torch.cat([*videos])
    return {**tokenizer(texts, return_tensors="pt"), "pixel_values": pixels}


def _replaced(processor: Any, text: str, pictures: Any, clips: Mapping[str, Any], counts: Size) -> list[str]:
    """The text with as many tokens for each image and clip as it has. `counts` are those of images and of clips."""
    images = [processor.replace_image_token(pictures, each) for each in range(counts[0])]
    videos = [processor.replace_video_token(clips, each) for each in range(counts[1])]
    return processor.get_text_with_replacements([text], images, videos)[0]


def clip_inputs(model: Any, pipe: Pipeline, folder: Path, clip: SampledFrames, fps: float) -> dict[str, Any]:
    """Return the inputs of transformers' `model` for a question about a clip of `fps` frames a second."""
    ids = torch.tensor([clip_ids(pipe, folder, clip, fps)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pipe.bundle.manifest.family == "internvl":
        return {**inputs, "pixel_values": clips_of(pipe, clip, fps)["pixel_values_videos"][0]}
    return {
        **inputs,
        "mm_token_type_ids": 2 * (ids == VIDEO_TOKEN).int(),
        "pixel_values_videos": torch.from_numpy(pipe.family.inputs(clip)["pixel_values"]).flatten(0, 1),
        "video_grid_thw": torch.tensor([patch_grid(pipe, clip)]),
        **seconds_per_patch(model, clip),
    }
