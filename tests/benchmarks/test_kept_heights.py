"""The benchmark of the heights of kept tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PIL import Image

from kept_heights import heights
from sinkprune import Pipeline


def test_heights_are_of_the_kept_tokens(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64", "retain-192"))
    answer = pipe.generate(photo, "What?", budget="retain-64", max_new_tokens=1)
    kept = answer.kept
    side = round(kept.layout.tokens**0.5)
    # Token 8 of a grid 8 wide is the first of the second line.
    lines = [int(token) // side for token in kept.index.ravel()]
    expected = [sum((line + 0.5) / side for line in lines) / len(lines)]
    for left in kept.after_stage.values():
        expected.append(sum((lines[row] + 0.5) / side for row in left.tolist()) / len(left))
    assert heights(answer) == pytest.approx(expected, abs=1e-6)
