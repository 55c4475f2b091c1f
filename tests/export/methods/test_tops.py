"""The stages of `tops` keep what the numpy reference does, of one image and of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sinkprune.contract.budgets import parse_budget
from sinkprune.export.dialects import opset24
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.references.reference import text_attention
from support.references.reference_methods import rows_like_the_image, tops_rows

Array = np.ndarray[Any, Any]
MODEL = replace(graphs.language_model(), num_layers=32)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("sizes", [(40,), (30, 9, 21)])
def test_stages_equal_the_reference(sizes: tuple[int, ...], alike: bool) -> None:
    """Each image has a count of its own. A prompt may have fewer images than its bundle takes."""
    rng, start, end = np.random.default_rng(len(sizes)), 4, 4 + sum(sizes)
    rows, counts = end + 5, [size // 4 for size in sizes]
    facts = PlanFacts(MODEL, 576, 16, PRECISIONS["fp32"], opset24, images=1 if len(sizes) == 1 else 4)
    plan = load_method("tops")(facts, parse_budget("llava", "retain-64"))
    assert [*plan.select_after] == [12, 24]
    shapes = {
        "hidden": (1, rows, MODEL.hidden_size),
        "cos": (1, rows, MODEL.head_dim // 2),
        "sin": (1, rows, MODEL.head_dim // 2),
        "query": (1, MODEL.num_heads, rows, MODEL.head_dim),
        "key": (1, MODEL.num_kv_heads, rows, MODEL.head_dim),
    }
    inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    visual, text, group = list(range(start, end)), list(range(end, rows)), np.repeat(np.arange(len(sizes)), sizes)
    if alike:
        for name in ("hidden", "key"):
            same = inputs[name][..., visual[:3], :]
            inputs[name][..., visual, :] = same[..., rng.integers(0, 3, len(visual)), :]
    given: dict[str, Array] = {"visual_index": np.array(visual), "text_index": np.array(text)}
    if len(sizes) > 1:
        given |= {"visual_group": group, "quota": np.repeat(np.arange(len(sizes)), counts)}
    else:
        counts = [plan.kept.resolve(576).stages[1]]
    found = graphs.loaded(plan.select_after[24])(**inputs, **given)["keep_index"].tolist()

    hidden = inputs["hidden"][0]
    asking = rows_like_the_image(hidden, visual, text)
    scores = text_attention(inputs["query"][0], inputs["key"][0], visual, asking)
    kept = set[int]()
    for image, count in enumerate(counts):
        own = np.flatnonzero(group == image)
        kept |= {visual[own[place]] for place in tops_rows(hidden[start + own], scores[own], count)}
    assert found == [row for row in range(rows) if row not in visual or row in kept]
