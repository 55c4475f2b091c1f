"""`sinkpruner-text` is SinkPruner with other scores: those of its numpy reference, group by group.

`sinkpruner-text-heads` has the same sanitizer.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget, parse_budget
from support.models import graphs
from support.models.token_features import KINDS, exact_rows, token_features
from support.references.question_methods import READING_SANITIZERS, text_scores
from support.references.reference import largest, sanitize

Array = np.ndarray[Any, Any]
WIDTH = graphs.language_model().hidden_size
LENGTHS = (1.0, 0.0, 2.0**60, 2.0**-60, 4.0, 0.5)
RETAIN_64 = parse_budget("llava", "retain-64")


def words(groups: int, n: int, seed: int = 3) -> dict[str, Array]:
    """Rows of the LLM whose cosines, and their means over four words, are exact in any arithmetic."""
    rng = np.random.default_rng(seed)
    embeddings, question = exact_rows(rng, groups, n, WIDTH), exact_rows(rng, 1, 4, WIDTH)[0]
    return {"embeddings": embeddings.astype(np.float32), "question": question.astype(np.float32)}


def assert_equals_reference(
    budget: Budget, inputs: dict[str, Array], precision: str = "fp32", method: str = "sinkpruner-text"
) -> list[list[int]]:
    """Compare the graph with its reference; returns what each group kept."""
    dtype = {"fp32": np.float32, "fp16": np.float16}[precision]
    for name in ("tokens", "embeddings", "question"):
        inputs = {**inputs, name: inputs[name].astype(dtype)}
    _, n, d = inputs["tokens"].shape
    out = graphs.method_sanitizer(method, n, d, budget, precision)(**inputs)
    counts = budget.resolve(n)
    for group, index in enumerate(out["kept_index"].tolist()):
        tokens, norms, salience, embeddings = (
            inputs[name][group] for name in ("tokens", "norms", "salience", "embeddings")
        )
        scores = text_scores(salience, embeddings, inputs["question"], largest(norms, counts.outliers))
        rows, expected = sanitize(
            tokens, norms, scores, reserve=counts.reserve, diverse=counts.diverse, remove_outliers=counts.outliers > 0
        )
        assert index == expected
        scale = np.abs(rows).max(initial=0).astype(np.float64)
        tolerance = {"fp32": 1e-5, "fp16": 1e-3}[precision]
        np.testing.assert_allclose(out["kept_tokens"][group], rows, rtol=tolerance, atol=tolerance * scale)
    return out["kept_index"].tolist()


@pytest.mark.parametrize(("kind", "precision"), [*product(KINDS, ("fp32", "fp16"))])
def test_the_choice_equals_the_reference(kind: str, precision: str) -> None:
    inputs = token_features(kind, groups=2) | words(2, 576)
    assert_equals_reference(RETAIN_64, inputs, precision)


@pytest.mark.parametrize("words_count", [1, 2, 8])
@pytest.mark.parametrize("budget", ["retain-192", "retain-32", "retain-64+keep-outliers"])
def test_budgets_and_questions_of_any_length(budget: str, words_count: int) -> None:
    inputs = token_features("random", 1, 64, 16) | words(1, 64)
    inputs["question"] = np.resize(inputs["question"], (words_count, WIDTH))
    assert_equals_reference(parse_budget("llava", budget), inputs)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.0, -1.0, 1e38])), min_size=24, max_size=24),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_ties_duplicates_zeros_and_extremes(drawn: list[tuple[int, float]], asked: list[int]) -> None:
    rows = exact_rows(np.random.default_rng(0), 1, 6, WIDTH)[0]
    kinds = [row * length for row, length in zip(rows, LENGTHS, strict=True)]
    inputs = token_features("tied", 1, 24, 8)
    inputs["salience"] = np.array([[salience for _, salience in drawn]], np.float32)
    inputs["embeddings"] = np.array([[kinds[kind] for kind, _ in drawn]], np.float32)
    inputs["question"] = np.array([kinds[kind] for kind in asked], np.float32)
    assert_equals_reference(parse_budget("llava", "retain-192"), inputs)


@pytest.mark.parametrize("method", READING_SANITIZERS)
def test_without_a_sanitizer_it_is_sinkpruner(method: str) -> None:
    plan = graphs.method_plan(method, 576, 48, parse_budget("llava", "retain-64+no-sanitizer"))
    assert plan.sanitizer is None and len(plan.select_after) == (1 if method == "sinkpruner-text" else 3)
