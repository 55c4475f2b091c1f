"""Unpruned answers about images and clips equal transformers, logits and words; in fp16 they are close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from sinkprune import Clip, Pipeline
from support.models.clips import INTERNVL_BUDGETS, VIDEO_BUDGETS, frames
from support.models.small_models import (
    CLIPS_IN_ONE_PIECE,
    INTERNVL_SHAPES,
    LLAVA_VARIANTS,
    NEXT_SHAPES,
    PALIGEMMA_SHAPES,
    QWEN_SHAPES,
    SHAPES,
)
from support.programs.slow_cases import each_once
from support.references.picture_prompts import clip_inputs, reference_inputs
from support.references.steps import QUESTION, watched
from support.references.transformers_runs import assert_equals_transformers

Models, Folders, Pipelines = Callable[[str], Any], Callable[[str], Path], Callable[..., Pipeline]

IMAGES = [
    # Square, wide, tall, smaller than a tile, a panorama whose height is padding almost alone
    *each_once(NEXT_SHAPES, [(224, 224), (640, 210), (150, 500), (30, 20), (900, 20)]),
    # Square, wide with ragged windows, tall, one merged token, below min_pixels, above max_pixels
    *each_once(QWEN_SHAPES, [(224, 224), (700, 200), (90, 500), (28, 28), (10, 12), (1200, 900)]),
    # A single tile where it may be one, two by two, a row of the most tiles, a column
    *each_once(INTERNVL_SHAPES, [(30, 30), (700, 700), (1300, 200), (90, 500)]),
    *((name, (300, 170)) for name in PALIGEMMA_SHAPES),
    *((name, (600, 400)) for name in (*SHAPES, *LLAVA_VARIANTS)),
]
CLIPS = [
    *((name, 2, 8) for name in CLIPS_IN_ONE_PIECE),
    ("qwen", 1.3, 8),
    ("qwen3-vl", 2, 8),
    ("qwen3-vl", 1.37, 7),
    *((name, 2, 8) for name in INTERNVL_SHAPES),
]
OF_INTERNVL: dict[str, Any] = {"budgets": INTERNVL_BUDGETS, "max_frames": 8}


def assert_equals(model: Any, inputs: dict[str, Any], folder: Path, pipe: Pipeline, picture: Any, count: int) -> None:
    """Assert that logits, tokens and text of an answer of `count` tokens are those of transformers."""
    answer = assert_equals_transformers(model, inputs, pipe, picture, QUESTION, count)
    # An answer that is cut within a character ends before it.
    text = AutoTokenizer.from_pretrained(folder).decode(answer.token_ids, skip_special_tokens=True)
    assert text.startswith(answer.text) and not text[len(answer.text) :].strip("\ufffd")


@pytest.mark.parametrize(("name", "size"), IMAGES, ids=str)
def test_answers_about_images(
    name: str, size: tuple[int, int], model: Models, checkpoint: Folders, pipeline: Pipelines, photo: Image.Image
) -> None:
    folder, image = checkpoint(name), photo.resize(size)
    # The pictures of LLaVA with the decoder of Qwen2 are LLaVA's.
    inputs = reference_inputs({"qwen2": "gqa-112"}.get(name, name), folder, [image], QUESTION)
    options = (
        OF_INTERNVL if name in INTERNVL_SHAPES else {"budgets": ("retain-64",)} if name in LLAVA_VARIANTS else {}
    )
    assert_equals(model(name), inputs, folder, pipeline(name, **options), image, 16)


@pytest.mark.parametrize(("name", "fps", "count"), CLIPS)
def test_answers_about_clips(
    name: str, fps: float, count: int, model: Models, checkpoint: Folders, pipeline: Pipelines, photo: Image.Image
) -> None:
    """Ragged windows; 8 frames make 4 groups, or 8 in InternVL."""
    options = OF_INTERNVL if name in INTERNVL_SHAPES else {"budgets": VIDEO_BUDGETS, "max_frames": 8}
    folder, pipe = checkpoint(name), pipeline(name, **options)
    clip = Clip(frames(count, (170, 140), photo), fps)
    inputs = clip_inputs(model(name), pipe, folder, pipe.family.sample_frames(clip), fps)
    assert_equals(model(name), inputs, folder, pipe, clip, 6)


@pytest.mark.parametrize("name", SHAPES)
def test_norms_and_logits_in_fp16_are_close(name: str, pipeline: Pipelines, photo: Image.Image) -> None:
    whole, half = (
        watched(pipe, photo, max_new_tokens=1)
        for pipe in (pipeline(name), pipeline(name, "fp16", ("retain-64", "retain-64+compact")))
    )
    assert half.logits[0].dtype == np.float16 and half.features[0].norms.dtype == np.float32
    np.testing.assert_allclose(half.features[0].norms, whole.features[0].norms, rtol=5e-3)
    assert np.abs(half.logits[0] - whole.logits[0]).max() < 0.05 * np.abs(whole.logits[0]).max()
