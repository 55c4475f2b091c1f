"""An fp16 bundle computes what its fp32 twin computes, within the type's reach."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from support.models.small_models import SHAPES
from support.references.steps import watched

BUDGETS = ("retain-64", "retain-64+compact")


def features_and_logits(pipeline: Pipeline, photo: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    steps = watched(pipeline, photo, max_new_tokens=1)
    return steps.features[0].norms, steps.logits[0]


@pytest.mark.parametrize("name", SHAPES)
def test_norms_and_logits_are_close(name: str, pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    norms, logits = features_and_logits(pipeline(name), photo)
    norms16, logits16 = features_and_logits(pipeline(name, "fp16", BUDGETS), photo)
    assert logits16.dtype == np.float16
    assert norms16.dtype == np.float32
    np.testing.assert_allclose(norms16, norms, rtol=5e-3)
    assert np.abs(logits16 - logits).max() < 0.05 * np.abs(logits).max()
