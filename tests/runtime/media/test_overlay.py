"""The public overlay: what is drawn, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from sinkprune import Clip, Pipeline, UsageError, overlay
from sinkprune.runtime.overlay import draw_overlay, token_fates

Pipelines = Callable[..., Pipeline]


def test_question_answer_and_numbers_are_written_and_none_is_cut_off(
    pipeline: Pipelines, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, written = pipeline("gqa-112").generate(photo, "What?", budget="retain-64", max_new_tokens=1), []

    def text(self: ImageDraw.ImageDraw, place: tuple[int, int], text: str, **options: Any) -> None:
        written.append(text)
        assert place[0] + options["font"].getlength(text) <= self.im.size[0], text

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    overlay(replace(answer, text="yes"), photo, "W" * 70 + " is 電 there?")
    first, last = answer.tokens_per_layer[0], answer.tokens_per_layer[-1]
    numbers = f"picture {answer.visual_tokens}, into the LLM {first}, last layer {last}"
    question = next(number for number, line in enumerate(written) if line.startswith("question: WWW"))
    assert " ".join(written[question:]).endswith(
        f"is \\u96fb there? answer: yes budget: retain-64; visual tokens: {numbers}"
    )


def test_what_the_sanitizer_dropped_is_grey(pipeline: Pipelines) -> None:
    """So that no colour of the picture passes for that of a sink member or a stage."""
    red = Image.new("RGB", (112, 112), (250, 40, 30))
    answer = pipeline("gqa-112").generate(red, "What?", budget="retain-64", max_new_tokens=1)
    kept = answer.kept
    fates = token_fates(kept)
    token = int(np.flatnonzero(~fates.sink & ~fates.kept)[0])
    left, top, right, bottom = kept.layout.boxes[token]
    scale = 1100 / 112
    centre = (int((left + right) / 2 * scale), int((top + bottom) / 2 * scale))
    pixel = draw_overlay([red], answer.method, kept).getpixel(centre)
    assert isinstance(pixel, tuple) and max(pixel) - min(pixel) < 8


def test_what_cannot_be_drawn_is_refused(pipeline: Pipelines, photo: Image.Image) -> None:
    pipe = pipeline("gqa-112")
    pruned = pipe.generate(photo, "What?", budget="retain-64", max_new_tokens=1)
    with pytest.raises(UsageError, match="ran without pruning"):
        overlay(pipe.generate(photo, "What?", max_new_tokens=1), photo)
    with pytest.raises(UsageError, match="found 2 pictures, the answer is about 1"):
        overlay(pruned, [photo, photo])
    with pytest.raises(UsageError, match=r"found a picture of 10x20 pixels, the answer is about one of \d+x\d+"):
        overlay(pruned, photo.resize((10, 20)))
    with pytest.raises(UsageError, match="found a clip of 1 frame, the answer is about an image"):
        overlay(pruned, Clip([photo], 1.0))
    answer = pipe.generate((), "What?", max_new_tokens=1)
    with pytest.raises(UsageError, match="about no picture, so there is nothing to draw"):
        overlay(answer, ())
    with pytest.raises(UsageError, match="about no picture, so nothing was kept"):
        _ = answer.kept
