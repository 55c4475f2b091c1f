"""Prompts with pictures in them are, token for token, those of transformers.

Qwen's processors need torchvision even for images; there it is the tokenizer on what they write: the chat template's
text, with a picture's token once for each merged patch of its grid.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Clip, Pipeline
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import new_request
from support.models.clips import frames
from support.models.qwen_checkpoints import VIDEO_TOKEN
from support.models.small_models import CLIPS_IN_ONE_PIECE
from support.programs.slow_cases import each_once
from support.references.picture_prompts import PIECES, SIZES, clip_ids, images_of, reference_inputs
from support.references.steps import QUESTION

THREE = ["", " ", "\n Wie groß? ", "What differs? "]


def found(pipe: Pipeline, pictures: list[Any], question: str | list[str], token: int) -> list[int]:
    """Our ids, with a picture's token between the texts as often as the picture has rows unpruned."""
    texts = pipe.prompts.encode(new_request(pictures, question).texts).texts
    rows = [[token] * len(pipe.family.layout(decoded(picture, pipe.family)).unpruned_rows) for picture in pictures]
    return [*chain.from_iterable(text + picture for text, picture in zip(texts, [*rows, []], strict=True))]


@pytest.mark.parametrize(
    ("name", "case"),
    each_once(
        SIZES,
        [(1, QUESTION), (2, QUESTION), (3, QUESTION), (1, ["See ", "?"]), (2, PIECES), (3, THREE)],
    ),
)
def test_ids_with_images_equal_transformers(
    name: str,
    case: tuple[int, str | list[str]],
    checkpoint: Callable[[str], Path],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
) -> None:
    count, question = case
    pictures = [*images_of(name, photo), photo.resize((112, 56))][:count]
    pipe = pipeline(name, max_images=3)
    expected = reference_inputs(name, checkpoint(name), pictures, question)["input_ids"][0].tolist()
    token = pipe.bundle.manifest.tokens.image
    assert found(pipe, pictures, question, token) == expected


@pytest.mark.parametrize("name", CLIPS_IN_ONE_PIECE)
@pytest.mark.parametrize("question", [QUESTION, ["See ", "\n and\u00a0tell."]], ids=["in front", "within"])
def test_ids_with_a_clip_equal_transformers(
    name: str,
    question: str | list[str],
    checkpoint: Callable[[str], Path],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
) -> None:
    pipe = pipeline(name, max_frames=8)
    clip = Clip(frames(7, (170, 140), photo), fps=2)
    expected = clip_ids(pipe, checkpoint(name), pipe.family.sample_frames(clip), 2, question)
    # Three pairs of frames, each of 5 x 6 tokens of 28 pixels
    assert expected.count(VIDEO_TOKEN) == 90
    assert found(pipe, [clip], question, VIDEO_TOKEN) == expected
