"""A request longer than the context is refused with what would fit: a budget, or fewer and smaller pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from sinkprune import Clip, Pipeline
from sinkprune.contract.errors import PromptError
from sinkprune.runtime.steps.context_length import RequestLength, too_long_error
from support.models.clips import VIDEO_BUDGETS, frames
from support.references.picture_prompts import BUDGETS
from support.references.steps import QUESTION


@pytest.mark.parametrize(
    ("length", "kept", "said"),
    [
        (RequestLength(100, 600, 400, 1024), {"a": 300, "b": 500, "c": 600}, "324 new tokens. Budget 'b' keeps 500"),
        (
            RequestLength(100, 1000, 24, 1024),
            {"a": 300, "b": 500},
            "positions. Shorten the prompt. Budget 'b' keeps 500",
        ),
        (
            RequestLength(20, 2000, 504, 1024),
            {"a": 600, "b": 800},
            "'a' keeps fewest, 600 visual tokens, .* 500. Smaller!$",
        ),
        (
            RequestLength(300, 2000, 224, 1024),
            {"a": 600},
            "600 visual tokens, .* 500. Smaller! Or shorten the prompt.$",
        ),
        (RequestLength(2000, 50, 4, 1024), {"a": 30}, "1024 positions. Shorten the prompt.$"),
        (RequestLength(100, 1000, 24, 1024), {}, "1024 positions. Shorten the prompt.$"),
    ],
)
def test_what_would_fit_is_said(length: RequestLength, kept: dict[str, int], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        raise too_long_error(length, kept, "Smaller!")


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("clip", 1, "Give fewer or smaller frames, .* --max-frames or --max-pixels"),
        ("qwen", 1, "Give a smaller image, .* --max-pixels"),
        ("qwen", 2, "Give fewer images or smaller ones, .* --max-pixels"),
        ("gqa-112", 3, r"Give fewer images\."),
        ("gqa-112", 1, r"Ask for fewer new tokens\."),
    ],
)
def test_where_no_budget_fits_the_way_out_is_that_of_what_was_given(
    name: str, count: int, said: str, pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    given: list[Any] = [photo.resize((500, 400))] * count
    if name == "clip":
        given = [Clip(frames(8, (500, 400), photo), 2)]
        pipe = pipeline("qwen", "fp32", VIDEO_BUDGETS, max_frames=8)
    else:
        pipe = pipeline(name, "fp32", BUDGETS[name], max_images=3)
    text = pipe.prompts.encode(["" for _ in given] + [QUESTION]).text_tokens
    new = pipe.bundle.manifest.language_model.max_positions - text - 5
    with pytest.raises(PromptError, match=f"No budget .* keeps fewest, [0-9]+ visual tokens, .* room for 5. {said}"):
        pipe.generate(given, QUESTION, max_new_tokens=new)
