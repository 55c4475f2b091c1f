"""The unpruned chain of exported graphs computes what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipImageProcessorPil,
)

from sinkprune import Pipeline
from support.models.small_models import LLAVA_VARIANTS, SHAPES
from support.references.steps import ask
from support.references.transformers_answers import greedy_answer

PROMPTS = ["What is in the picture?", "Describe the image, please: which colour is the cup?"]


def reference_inputs(folder: Path, image: Image.Image, prompt: str) -> dict[str, Any]:
    """What LlavaProcessor gives: the template's text, the image token repeated, pixel values."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlavaConfig.from_pretrained(folder).vision_config
    siglip = config.model_type == "siglip_vision_model"
    processor = (SiglipImageProcessorPil if siglip else CLIPImageProcessorPil).from_pretrained(folder)
    model_tokens = (config.image_size // 14) ** 2
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text.replace("<image>", "<image>" * model_tokens), return_tensors="pt")
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    return {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "pixel_values": pixels}


@pytest.mark.parametrize(
    ("name", "prompt"), [*product(SHAPES, PROMPTS), *((name, PROMPTS[0]) for name in LLAVA_VARIANTS)]
)
def test_greedy_text_and_logits_equal_transformers(
    name: str, prompt: str, checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    folder = checkpoint(name)
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = reference_inputs(folder, photo, prompt)
    expected = greedy_answer(model, inputs, 32)
    pipe = pipeline(name) if name in SHAPES else pipeline(name, budgets=("retain-64",))
    answer, logits = ask(pipe, photo, "none", 32, prompt)
    new = expected.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    assert np.abs(logits - torch.stack(expected.logits)[:, 0].numpy()).max() < 1e-3
    assert answer.token_ids == new
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert answer.text == tokenizer.decode(new, skip_special_tokens=True)
