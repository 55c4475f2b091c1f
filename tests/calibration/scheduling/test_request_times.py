"""Measured times of whole requests: how many there are, and what the progress of each measurement is called."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.scheduling.search import UNPRUNED_MODEL, PictureQuestion, RequestTimes


def test_each_measurement_counts_its_rounds_anew(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    told: list[str] = []
    times = RequestTimes(
        pipeline("gqa-112"), PictureQuestion(photo, "What?"), 0.0, lambda what, *_: told.append(what)
    )
    for _ in range(3):
        times.measure([UNPRUNED_MODEL], 1)
        assert times.requests == 3
    names = list(dict.fromkeys(what for what in told if what.startswith("measuring budgets")))
    assert names == ["measuring budgets", "measuring budgets, try 2", "measuring budgets, try 3"]
