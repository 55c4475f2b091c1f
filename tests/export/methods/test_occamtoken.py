"""OccamToken keeps the tokens whose evidence exceeds the threshold, as its numpy reference does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget
from sinkprune.contract.families import parse_budget
from sinkprune.contract.plans import MAX_TOP_K, exceeding
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import load_method
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs, VariableTokens
from support.models import graphs
from support.models.token_features import KINDS, token_features
from support.references.occamtoken import LEAST, evidence_of_tokens, kept_by_evidence, outliers_of
from support.references.reference import keep_rows, text_attention

Array = np.ndarray[Any, Any]
RETAIN_64 = parse_budget("llava", "retain-64")
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-3}


def plan_of(tokens: int | VariableTokens, d: int, budget: Budget = RETAIN_64, **more: Any) -> PlanGraphs:
    model = replace(graphs.language_model(), num_layers=more.pop("layers", 32))
    precision, dialect = PRECISIONS[more.pop("precision", "fp32")], DIALECTS[more.pop("dialect", "opset24")]
    return load_method("occamtoken")(PlanFacts(model, tokens, d, precision, dialect, **more), budget)


class Kept:
    """The two graphs before the LLM, run as the chain runs them."""

    def __init__(self, plan: PlanGraphs) -> None:
        assert plan.sanitizer is not None and plan.evidence is not None
        self._measure, self._keep = graphs.loaded(plan.evidence.graphs[0]), graphs.loaded(plan.sanitizer)

    def evidence(self, **inputs: Array) -> Array:
        return self._measure(norms=inputs["norms"], salience=inputs["salience"])["evidence"]

    def __call__(self, threshold: float, **inputs: Array) -> dict[str, Array]:
        low = inputs["norms"].size - len(outliers_of(inputs["norms"].ravel()))
        count = exceeding(self.evidence(**inputs), threshold, low)
        return self._keep(**inputs, quota=np.zeros(1 + count, np.int64))


def assert_equals_reference(run: Kept, threshold: float, inputs: dict[str, Array], precision: str = "fp32") -> int:
    """Compare the graphs with the reference, all groups as one; returns the number of kept rows."""
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs["tokens"] = inputs["tokens"].astype(PRECISIONS[precision].numpy)
    flat = [inputs[name].reshape(-1, *inputs[name].shape[2:]) for name in ("tokens", "norms", "salience")]
    out = run(threshold, **inputs)
    rows, index = kept_by_evidence(*flat, threshold)
    assert out["kept_index"].tolist() == [index]
    scale = np.abs(rows).max(initial=0).astype(np.float64)
    tolerance = TOLERANCE[precision]
    np.testing.assert_allclose(out["kept_tokens"][0], rows, rtol=tolerance, atol=tolerance * scale)
    return len(index)


@pytest.mark.parametrize(("dialect", "precision"), [*product(DIALECTS, TOLERANCE)])
def test_what_exceeds_the_threshold_stays(dialect: str, precision: str) -> None:
    run, counts = Kept(plan_of(576, 48, dialect=dialect, precision=precision)), set()
    for kind, threshold in product(KINDS, (-1.0, 0.0, 0.35, 0.9, 1.7, 3e38)):
        counts.add(assert_equals_reference(run, threshold, token_features(kind, 1), precision))
    # From all tokens that are no outliers to one; each with the register.
    assert {571, 2} < counts and len(counts) > 8


def test_evidence_is_in_units_of_the_outliers_salience() -> None:
    inputs = token_features("random", 2, 50, 8)
    found = Kept(plan_of(50, 8, groups=2)).evidence(**inputs)
    expected = evidence_of_tokens(inputs["norms"].ravel(), inputs["salience"].ravel())
    assert found.shape == (1, 100) and np.isneginf(found).sum() == 1
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
def test_groups_share_a_register_and_a_threshold(groups: int) -> None:
    run = Kept(plan_of(64, 8, groups=groups))
    inputs = token_features("random", groups, 64, 8)
    inputs["salience"] *= np.arange(1, groups + 1)[:, None]
    kept = {threshold: assert_equals_reference(run, threshold, inputs) for threshold in (0.1, 1.0, 1e9)}
    assert kept[0.1] > kept[1.0] > kept[1e9] == 2


@pytest.mark.parametrize("budget", ["prune-66.7", "prune-88.9+rho-100"])
def test_one_plan_serves_any_number_of_tokens(budget: str) -> None:
    chosen = parse_budget("qwen3-vl", budget)
    plan = plan_of(VariableTokens(480, 784, 480), 16, chosen, layers=28, deepstack=3)
    assert plan.sanitizer is not None and plan.evidence is not None
    measure, keep = graphs.loaded(plan.evidence.graphs[0]), graphs.loaded(plan.sanitizer)
    for n in (1, 2, 3, 19, 101, 480):
        inputs = token_features("random", 1, n, 16)
        beside = np.random.default_rng(n).standard_normal((1, n, 48)).astype(np.float32)
        rho = chosen.outlier_per_mille
        evidence = measure(norms=inputs["norms"], salience=inputs["salience"])["evidence"]
        count = exceeding(evidence, 1.0, plan.kept.resolve(n).reserve)
        out = keep(**inputs, deepstack=beside, quota=np.zeros(1 + count, np.int64))
        whole = np.concatenate([inputs["tokens"][0], beside[0]], axis=-1)
        rows, index = kept_by_evidence(whole, inputs["norms"][0], inputs["salience"][0], 1.0, rho)
        assert out["kept_index"].tolist() == [index], n
        np.testing.assert_allclose(out["kept_tokens"][0], rows[:, :16], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out["kept_deepstack"][0], rows[:, 16:], rtol=1e-5, atol=1e-5)


def test_ties_duplicates_zeros_and_extremes() -> None:
    n = 23
    run = Kept(plan_of(n, 4))
    rows = [row for row in product((-1.0, 0.0, 1.0), repeat=4) if np.count_nonzero(row) in (0, 1, 4)]
    # Powers of two, so that quotients are exact, and a threshold may be met exactly.
    salience = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0**-100, 2.0**20])
    token = st.tuples(st.sampled_from(rows), st.sampled_from([0.0, 1.0, 1.0, 3.0, 3e38]), salience)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(st.lists(token, min_size=n, max_size=n), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 3e38]))
    def holds(drawn: list[Any], threshold: float) -> None:
        tokens, norms, scores = (np.array([own[part] for own in drawn])[None] for part in range(3))
        assert_equals_reference(run, threshold, {"tokens": tokens, "norms": norms, "salience": scores})

    holds()


def stage_inputs(seed: int, rows: int, visual: list[int], heads: tuple[int, int] = (4, 2)) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    model = graphs.language_model(*heads)
    h = model.head_dim
    text = list(range(visual[-1] + 1, rows))
    return {
        "hidden": draw.standard_normal((1, rows, model.hidden_size)).astype(np.float32),
        "query": draw.standard_normal((1, heads[0], rows, h)).astype(np.float32),
        "key": draw.standard_normal((1, heads[1], rows, h)).astype(np.float32),
        "cos": draw.standard_normal((1, rows, h // 2)).astype(np.float32),
        "sin": draw.standard_normal((1, rows, h // 2)).astype(np.float32),
        "visual_index": np.array(visual, np.int64),
        "text_index": np.array(text, np.int64),
    }


@pytest.mark.parametrize(("dialect", "options"), [*product(DIALECTS, ("", "+visual-keys", "+compact"))])
def test_the_stage_tests_each_picture_against_its_own_register(dialect: str, options: str) -> None:
    budget = parse_budget("llava", "retain-64" + options)
    model = replace(graphs.language_model(4, 2), num_layers=32)
    facts = PlanFacts(model, 20, 32, PRECISIONS["fp32"], DIALECTS[dialect], images=2)
    plan = load_method("occamtoken")(facts, budget)
    assert plan.evidence is not None
    measure, select = graphs.loaded(plan.evidence.graphs[1]), graphs.loaded(plan.select_after[15])
    sizes, counts = (9, 13), set()
    for seed, text in product(range(6), (0, 5)):
        first, second = list(range(2, 2 + sizes[0])), list(range(14, 14 + sizes[1]))
        inputs = stage_inputs(seed, second[-1] + 1 + text, [*first, *second])
        group = np.repeat([0, 1], sizes)
        register = np.repeat([0, sizes[0]], sizes)
        given = {name: inputs[name] for name in ("hidden", "query", "key", "visual_index", "text_index")}
        evidence = measure(**given, register=register)["evidence"]
        arrays = (inputs["query"][0], inputs["key"][0], [*first, *second], inputs["text_index"].tolist())
        scores = text_attention(*arrays, visual_keys="visual-keys" in options)
        expected = scores / np.maximum(scores[register], LEAST)
        np.testing.assert_allclose(evidence, expected, rtol=1e-4)

        quotas = [exceeding(evidence[group == own], 1.1, size) for own, size in enumerate(sizes)]
        counts.update(quotas)
        rows = inputs["hidden"].shape[1]
        wanted = set(range(rows))
        for own, part in enumerate((first, second)):
            passed = max(1, int((expected[group == own] > 1.1).sum()))
            assert passed == quotas[own]
            wanted &= set(keep_rows(scores[group == own], rows, part, passed))
        names = ("hidden", "cos", "sin", "visual_index", "text_index")
        out = select(
            **{name: inputs[name] for name in names},
            evidence=evidence,
            visual_group=group,
            quota=np.repeat([0, 1], quotas),
        )
        assert out["keep_index"].tolist() == sorted(wanted)
        np.testing.assert_array_equal(out["hidden_out"], inputs["hidden"][:, sorted(wanted)])
    assert len(counts) > 4


def test_a_register_without_attention_lets_all_others_pass() -> None:
    run = Kept(plan_of(23, 4))
    inputs = {"tokens": np.ones((1, 23, 4)), "norms": np.zeros((1, 23)), "salience": np.full((1, 23), 2.0**-40)}
    inputs["norms"][0, 5], inputs["salience"][0, 5] = 1.0, 0.0
    assert assert_equals_reference(run, 1e6, inputs) == 23
    inputs["salience"][:] = 0.0
    # No evidence at all: the first token stays.
    assert assert_equals_reference(run, 0.0, inputs) == 2


def test_no_more_pass_than_tensorrt_ranks() -> None:
    assert exceeding(np.ones(10_000, np.float32), 0.5, 9_900) == MAX_TOP_K
    assert exceeding(np.ones(10, np.float32), 0.5, 7) == 7
    assert exceeding(np.zeros(10, np.float32), 0.5, 7) == 1
    # fp32 evidence that equals the threshold does not exceed it, also where fp64 would differ.
    assert exceeding(np.array([0.1, 0.2], np.float32), float(np.float32(0.1)), 2) == 1


def test_the_counts_of_llava_7b_are_aims() -> None:
    plan = plan_of(576, 8)
    assert plan.evidence is not None
    assert [aim.of(576) for aim in plan.evidence.aims] == [101, 34]
    assert list(plan.select_after) == [15]
