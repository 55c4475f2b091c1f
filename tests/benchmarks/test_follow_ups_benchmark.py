"""The benchmark of second questions repeats the tokens that a question chose, and only these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from follow_ups import FrozenSelects
from sinkprune import Pipeline
from support.references.same_answers import kept_sets

FIRST, SECOND = "What is on the table?", "Is the cup full, and where is it?"


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_frozen_selects_keep_what_they_kept_last(
    backend: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    selects, options = FrozenSelects(), {"budget": "retain-64", "max_new_tokens": 4, "min_new_tokens": 4}
    path = bundle("gqa-112", "fp32", ("retain-64",))
    pipeline = Pipeline.load(path, backend=backend, compute="fp32", wrap=selects.wrap)
    second = pipeline.generate(photo, SECOND, **options)
    selects.frozen = True
    again = pipeline.generate(photo, SECOND, **options)
    assert again.token_ids == second.token_ids
    selects.frozen = False
    first = pipeline.generate(photo, FIRST, **options)
    selects.frozen = True
    found = pipeline.generate(photo, SECOND, **options)
    assert kept_sets(found) == kept_sets(first) != kept_sets(second)
    assert found.kv_bytes == second.kv_bytes
    for layer, kept in found.images[0].after_stage.items():
        np.testing.assert_array_equal(kept, first.images[0].after_stage[layer])
