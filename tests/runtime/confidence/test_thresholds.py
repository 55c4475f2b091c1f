"""Thresholds that a program makes are checked before a request runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline, Thresholds, UsageError

SHARE = r"a least confidence .*expected a number from 0 to 1"


@pytest.mark.parametrize(
    ("least", "said"),
    [
        *((least, SHARE) for least in (3, {"retain-64": "x"}, {"retain-64": 2.0}, {"retain-64": -1})),
        ({}, r"^the thresholds name no budget\. Measure them"),
    ],
)
def test_thresholds_are_shares_of_budgets(
    least: Any, said: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    pipeline = Pipeline.load(bundle("gqa-112"))
    pipeline.thresholds = Thresholds(1, pipeline.bundle.sha256, pipeline.backend.compute, "sinkpruner", least)
    with pytest.raises(UsageError, match=said):
        pipeline.stream(photo, "Is there a red circle?", budget="auto", choice=["yes", "no"])
