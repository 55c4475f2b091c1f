"""TOPS keeps what its numpy reference does, before the LLM and in its stages, of one image and of several."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget, parse_budget
from sinkprune.export.dialects import DIALECTS, load_dialect
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.token_features import KINDS, exact_rows, token_features
from support.references.reference import text_attention
from support.references.reference_methods import rows_like_the_image, tops, tops_rows

Array = np.ndarray[Any, Any]
NAMES = ("tokens", "norms", "salience")
RETAIN_64, RETAIN_192 = (parse_budget("llava", name) for name in ("retain-64", "retain-192"))
LENGTHS = (1.0, 0.0, 2.0**60, 2.0**-60)
MODEL = replace(graphs.language_model(), num_layers=32)


def plan_of(tokens: int | VariableTokens, d: int, budget: Budget = RETAIN_192, **more: Any) -> PlanGraphs:
    precision, dialect = PRECISIONS[more.pop("precision", "fp32")], load_dialect(more.pop("dialect", "opset24"))
    return load_method("tops")(PlanFacts(MODEL, tokens, d, precision, dialect, **more), budget)


def sanitizer(plan: PlanGraphs) -> graphs.Run:
    assert plan.sanitizer is not None
    return graphs.loaded(plan.sanitizer)


def assert_equals_reference(run: graphs.Run, kept: Budget, inputs: dict[str, Array], precision: str = "fp32") -> None:
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs["tokens"] = inputs["tokens"].astype(precision.replace("fp", "float"))
    out, count = run(**inputs), kept.resolve(inputs["tokens"].shape[1]).kept
    for group, index in enumerate(out["kept_index"].tolist()):
        tokens, norms, salience = (inputs[name][group] for name in NAMES)
        rows, expected = tops(tokens, norms, salience, count)
        assert index == expected and len(index) == count
        np.testing.assert_array_equal(out["kept_tokens"][group], rows)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sanitizer_equals_the_reference(kind: str, precision: str, dialect: str) -> None:
    plan = plan_of(100, 16, precision=precision, dialect=dialect)
    assert_equals_reference(sanitizer(plan), plan.kept, token_features(kind, 2, 100, 16), precision)


def test_one_sanitizer_serves_any_number_of_tokens() -> None:
    plan = plan_of(VariableTokens(64, 784, 64), 16, parse_budget("qwen3-vl", "prune-77.8"))
    run = sanitizer(plan)
    for n, kind in product((1, 2, 5, 64), ("random", "tied")):
        assert_equals_reference(run, plan.kept, token_features(kind, 1, n, 16))


def test_ties_duplicates_zeros_and_extremes() -> None:
    kinds = exact_rows(np.random.default_rng(0), 1, 4, 8)[0] * np.array(LENGTHS)[:, None]
    plan = plan_of(24, 8)
    run = sanitizer(plan)

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, -1.0, 3e38])), min_size=24, max_size=24))
    def holds(drawn: list[tuple[int, float]]) -> None:
        inputs = token_features("tied", 1, 24, 8)
        inputs["tokens"] = kinds[[number for number, _ in drawn]][None]
        inputs["salience"] = np.array([[salience for _, salience in drawn]])
        assert_equals_reference(run, plan.kept, inputs)

    holds()


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("sizes", [(40,), (30, 9, 21)])
def test_stages_equal_the_reference(sizes: tuple[int, ...], alike: bool) -> None:
    """Each image has a count of its own. A prompt may have fewer images than its bundle takes."""
    rng, start, end = np.random.default_rng(len(sizes)), 4, 4 + sum(sizes)
    rows, counts = end + 5, [size // 4 for size in sizes]
    plan = plan_of(576, 16, RETAIN_64, images=1 if len(sizes) == 1 else 4)
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
