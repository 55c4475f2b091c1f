"""VScan keeps and merges what its numpy reference does, on grids and in pictures of any number of tokens."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import FAMILIES, Budget, parse_budget, prune_layers, scaled_layers
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.dialects import DIALECTS, load_dialect
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.token_features import KINDS, token_features
from support.references.reference_methods import vscan

Array = np.ndarray[Any, Any]
NAMES = ("tokens", "norms", "salience")
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-3}
RETAIN_64 = parse_budget("llava", "retain-64")


def plan_of(tokens: int | VariableTokens, d: int, budget: Budget, layers: int = 32, **more: Any) -> PlanGraphs:
    model = replace(graphs.language_model(), num_layers=layers)
    precision, dialect = PRECISIONS[more.pop("precision", "fp32")], load_dialect(more.pop("dialect", "opset24"))
    return load_method("vscan")(PlanFacts(model, tokens, d, precision, dialect, **more), budget)


def assert_equals_reference(
    plan: PlanGraphs, inputs: dict[str, Array], precision: str = "fp32", side: int | None = None
) -> list[list[int]]:
    """Compare a plan's sanitizer with the reference, group by group; returns what each group kept."""
    assert plan.sanitizer is not None
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs["tokens"] = inputs["tokens"].astype(precision.replace("fp", "float"))
    out = graphs.loaded(plan.sanitizer)(**inputs)
    assert out["kept_tokens"].dtype == inputs["tokens"].dtype
    counts = plan.kept.resolve(inputs["tokens"].shape[1])
    for group, index in enumerate(out["kept_index"].tolist()):
        arrays = [inputs[name][group] for name in NAMES]
        rows, expected = vscan(*arrays, counts.kept, local=counts.diverse, side=side)
        assert index == expected
        scale, tolerance = np.abs(rows).max(initial=0).astype(np.float64), TOLERANCE[precision]
        np.testing.assert_allclose(out["kept_tokens"][group], rows, rtol=tolerance, atol=tolerance * scale)
    return out["kept_index"].tolist()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_both_scans_and_the_merging_equal_the_reference(kind: str, precision: str, dialect: str) -> None:
    plan = plan_of(576, 48, RETAIN_64, precision=precision, dialect=dialect)
    for index in assert_equals_reference(plan, token_features(kind, groups=3), precision, side=24):
        assert len(set(index)) == len(index) == 98


@pytest.mark.parametrize("budget", ["retain-192", "retain-32", "retain-64+no-sanitizer", "retain-64+drop-sink"])
@pytest.mark.parametrize("n", [1, 2, 4, 5, 9, 12, 25, 49, 50, 64, 121])
def test_small_grids_and_grids_that_are_not_square(n: int, budget: str) -> None:
    side = isqrt(n) if isqrt(n) ** 2 == n else None
    assert_equals_reference(
        plan_of(n, 8, parse_budget("llava", budget)), token_features("random", 2, n, 8), side=side
    )


@pytest.mark.parametrize("budget", ["prune-66.7", "prune-88.9"])
def test_one_sanitizer_serves_any_number_of_tokens(budget: str) -> None:
    plan = plan_of(VariableTokens(480, 784, 480), 16, parse_budget("qwen3-vl", budget), 28)
    for n, kind in product((1, 2, 3, 4, 5, 8, 19, 64, 101, 480), ("random", "tied", "duplicated")):
        if (n, kind) != (1, "duplicated"):
            assert_equals_reference(plan, token_features(kind, 1, n, 16))


@pytest.mark.parametrize("n", [36, 37])
def test_ties_duplicates_and_zeros(n: int) -> None:
    rows = [row for row in product((-1.0, 0.0, 1.0), repeat=4) if np.count_nonzero(row) in (0, 1, 4)]
    token = st.tuples(
        st.sampled_from(rows), st.sampled_from([1.0, 3.0, 0.1, 300.0]), st.sampled_from([0.0, 0.25, -1.0, 3e38])
    )
    plan = plan_of(n, 4, parse_budget("llava", "retain-192"))

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.lists(token, min_size=n, max_size=n))
    def holds(drawn: list[Any]) -> None:
        tokens = np.array([np.array(row) * scale for row, scale, _ in drawn])
        salience = np.array([score for _, _, score in drawn])
        inputs = {"tokens": tokens[None], "norms": np.ones((1, n)), "salience": salience[None]}
        assert_equals_reference(plan, inputs, side=6 if n == 36 else None)

    holds()


def test_deepstack_features_are_merged_with_their_tokens() -> None:
    n, d = 101, 16
    inputs = token_features("random", 1, n, d)
    beside = np.random.default_rng(5).standard_normal((1, n, 3 * d)).astype(np.float32)
    plan = plan_of(VariableTokens(480, 784, 480), d, parse_budget("qwen3-vl", "prune-77.8"), 28, deepstack=3)
    assert plan.sanitizer is not None
    out = graphs.loaded(plan.sanitizer)(**inputs, deepstack=beside)
    counts = plan.kept.resolve(n)
    arrays = [inputs[name][0] for name in NAMES]
    whole, index = vscan(*arrays, counts.kept, local=counts.diverse, beside=beside[0])
    assert out["kept_index"].tolist() == [index]
    np.testing.assert_allclose(out["kept_tokens"][0], whole[:, :d], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out["kept_deepstack"][0], whole[:, d:], rtol=1e-5, atol=1e-5)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.integers(4, 60), st.integers(1, 3000), st.sampled_from(sorted(FAMILIES["llava"].budgets)), st.booleans())
def test_both_stages_meet_the_mean_on_any_model(layers: int, n: int, name: str, all_in: bool) -> None:
    budget = parse_budget("llava", name + ("+no-sanitizer" if all_in else ""))
    wanted = PictureSchedule.of(budget.resolve(n), 1, prune_layers(layers)).mean(layers)
    plan = plan_of(n, 8, budget, layers)
    counts, cuts = plan.kept.resolve(n), tuple(plan.select_after)
    assert cuts == scaled_layers((16,), layers)
    assert 1 <= counts.stages[0] <= counts.kept <= n
    found = PictureSchedule.of(counts, 1, cuts).mean(layers)
    # A sink makes a budget of one token two.
    assert abs(found - min(n, max(1, wanted))) <= Fraction(1, 2)


def test_more_tokens_than_topk_gives_are_rejected() -> None:
    with pytest.raises(BudgetError, match=r"keeps \d+ in one step; TensorRT's TopK gives at most 3840.*--max-pixels"):
        plan_of(VariableTokens(20_000, 784, 20_000), 16, parse_budget("qwen3-vl", "prune-66.7"), 28, precision="fp16")
