"""An unpruned LLaVA-NeXT answer equals transformers, logits and words, whatever the picture's shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
)

from sinkprune import Pipeline
from support.models.small_models import NEXT_SHAPES
from support.programs.slow_cases import each_once
from support.references.steps import QUESTION, ask
from support.references.transformers_answers import greedy_answer

NEW_TOKENS = 16
# Square, wide, tall, smaller than a tile, a panorama whose height is padding almost alone
SIZES = [(224, 224), (640, 210), (150, 500), (30, 20), (900, 20)]


def reference_inputs(folder: Path, image: Image.Image) -> dict[str, Any]:
    """What LlavaNextProcessor gives."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil.from_pretrained(folder),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return dict(processor(text=text, images=image, return_tensors="pt"))


@pytest.mark.parametrize(("size", "name"), each_once(SIZES, NEXT_SHAPES))
def test_greedy_text_and_logits_equal_transformers(
    name: str,
    size: tuple[int, int],
    checkpoint: Callable[[str], Path],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
) -> None:
    folder, image = checkpoint(name), photo.resize(size)
    model = LlavaNextForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = reference_inputs(folder, image)
    expected = greedy_answer(model, inputs, NEW_TOKENS)
    answer, logits = ask(pipeline(name), image, "none", NEW_TOKENS)
    length = inputs["input_ids"].shape[1]
    new = expected.sequences[0, length:].tolist()
    assert np.abs(logits - torch.stack(expected.logits)[:, 0].numpy()).max() < 1e-3
    assert answer.token_ids == new
    assert answer.text == AutoTokenizer.from_pretrained(folder).decode(new, skip_special_tokens=True)
    assert answer.tokens_per_layer[0] + answer.prompt_tokens == length
