"""An unpruned Qwen2.5-VL answer equals transformers, logits and words, whatever the picture's shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from sinkprune import Pipeline
from support.models.qwen_checkpoints import IMAGE_TOKEN
from support.models.small_models import QWEN_SHAPES
from support.programs.slow_cases import each_once
from support.references.steps import QUESTION, ask
from support.references.transformers_answers import greedy_answer

NEW_TOKENS = 16
# Square, wide with ragged windows, tall, one merged token, below min_pixels, above max_pixels
SIZES = [(224, 224), (700, 200), (90, 500), (28, 28), (10, 12), (1200, 900)]


def reference_inputs(folder: Path, image: Image.Image) -> dict[str, Any]:
    """What Qwen2_5_VLProcessor gives: the template's text, the image token repeated, patches, their grid."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\n") and "<|vision_start|><|image_pad|><|vision_end|>" in text
    picture = Qwen2VLImageProcessorPil.from_pretrained(folder)(image, return_tensors="pt")
    count = int(picture["image_grid_thw"].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt")
    types = (ids["input_ids"] == IMAGE_TOKEN).int()
    return {
        "input_ids": ids["input_ids"],
        "attention_mask": ids["attention_mask"],
        "mm_token_type_ids": types,
        **picture,
    }


@pytest.mark.parametrize(
    ("size", "name"),
    # Sizes differ in the preprocessing and the positions, which all checkpoints have alike.
    each_once(SIZES, QWEN_SHAPES),
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}x{value[1]}",
)
def test_greedy_text_and_logits_equal_transformers(
    name: str,
    size: tuple[int, int],
    checkpoint: Callable[[str], Path],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
) -> None:
    folder, image, pipe = checkpoint(name), photo.resize(size), pipeline(name)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = reference_inputs(folder, image)
    expected = greedy_answer(model, inputs, NEW_TOKENS)
    answer, logits = ask(pipe, image, "none", NEW_TOKENS)
    length = inputs["input_ids"].shape[1]
    new = expected.sequences[0, length:].tolist()
    wanted = torch.stack(expected.logits)[:, 0].numpy()
    assert np.abs(logits - wanted).max() < 1e-3
    assert answer.token_ids == new
    assert answer.text == AutoTokenizer.from_pretrained(folder).decode(new, skip_special_tokens=True)
    assert answer.visual_tokens + answer.prompt_tokens == length
