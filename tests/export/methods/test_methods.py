"""Every method before the LLM keeps what its numpy reference keeps, index for index and row for row."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget, parse_budget
from sinkprune.export.methods import METHODS as ALL_METHODS
from support.models import graphs
from support.models.token_features import KINDS, token_features
from support.programs.repository import ROOT
from support.references.reference import largest
from support.references.reference_methods import ON_A_GRID

Array = np.ndarray[Any, Any]
DTYPES = {"fp32": np.float32, "fp16": np.float16}
N, D = 576, 48
RETAIN_64 = parse_budget("llava", "retain-64")


def assert_equals_reference(method: str, budget: Budget, precision: str, inputs: dict[str, Array]) -> list[list[int]]:
    """Compare a method's graph with its reference, group by group; returns what each group kept."""
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    inputs["tokens"] = inputs["tokens"].astype(DTYPES[precision])
    _, n, d = inputs["tokens"].shape
    out = graphs.method_sanitizer(method, n, d, budget, precision)(**inputs)
    assert out["kept_tokens"].dtype == DTYPES[precision]
    k = graphs.tokens_into_llm(n, budget)
    tolerance = {"fp32": 1e-5, "fp16": 1e-3}[precision]
    for group, index in enumerate(out["kept_index"].tolist()):
        rows, expected = ON_A_GRID[method](*(inputs[name][group] for name in ("tokens", "norms", "salience")), k)
        assert index == expected
        scale = np.abs(rows).max(initial=0).astype(np.float64)
        np.testing.assert_allclose(out["kept_tokens"][group], rows, rtol=tolerance, atol=tolerance * scale)
    return out["kept_index"].tolist()


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ON_A_GRID)
def test_selection_equals_the_reference(method: str, kind: str, precision: str) -> None:
    for index in assert_equals_reference(method, RETAIN_64, precision, token_features(kind, groups=3)):
        assert len(set(index)) == len(index) == 68


@pytest.mark.parametrize("budget", ["retain-192", "retain-32", "retain-64+no-sanitizer"])
@pytest.mark.parametrize("method", ON_A_GRID)
def test_small_and_large_counts(method: str, budget: str) -> None:
    for n in (2, 5, 64):
        assert_equals_reference(method, parse_budget("llava", budget), "fp32", token_features("random", 2, n, 8))


@pytest.mark.parametrize("method", ON_A_GRID)
def test_ties_duplicates_and_zeros(method: str) -> None:
    rows = [row for row in product((-1.0, 0.0, 1.0), repeat=4) if np.count_nonzero(row) in (0, 1, 4)]
    token = st.tuples(
        st.sampled_from(rows), st.sampled_from([1.0, 3.0, 0.1, 300.0]), st.sampled_from([0.0, 1.0, 2.0, 300.0])
    )
    budget = parse_budget("llava", "retain-192")

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(token, st.sampled_from([0.0, 0.25, -1.0, 3e38])), min_size=24, max_size=24))
    def holds(drawn: list[Any]) -> None:
        tokens = np.array([np.array(row) * scale for (row, scale, _), _ in drawn])
        norms, salience = np.array([norm for (_, _, norm), _ in drawn]), np.array([score for _, score in drawn])
        inputs = {"tokens": tokens[None], "norms": norms[None], "salience": salience[None]}
        assert_equals_reference(method, budget, "fp32", inputs)

    holds()


@pytest.mark.parametrize("kind", ["outliers", "tied"])
def test_the_filtered_visionzip_never_keeps_a_top_rho_token(kind: str) -> None:
    inputs = token_features(kind, groups=4)
    # What has the largest norm is also the most salient.
    inputs["salience"] = inputs["norms"]
    kept = assert_equals_reference("visionzip+filter", RETAIN_64, "fp32", inputs)
    plain = assert_equals_reference("visionzip", RETAIN_64, "fp32", inputs)
    for group, norms in enumerate(inputs["norms"]):
        outliers = set(largest(norms, 6))
        assert not outliers & set(kept[group])
        assert outliers <= set(plain[group])


@pytest.mark.parametrize("method", [*ON_A_GRID, "random", "vscan"])
def test_fp16_tokens_are_never_computed_with(method: str) -> None:
    found = graphs.operators_on_fp16(graphs.method_plan(method, 64, 8, RETAIN_64, "fp16").sanitizer)
    assert found <= {"Shape", "Cast", "CastLike", "GatherND", "Concat"}


def test_the_page_of_methods_names_every_method_and_no_other() -> None:
    page = (ROOT / "docs" / "methods.md").read_text("utf-8")
    rules = page.split("## The rules\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\|.*\n", rules, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert {f"sinkpruner{name}" if name.startswith("-") else name for name in names} == set(ALL_METHODS)
    assert [name for name in ALL_METHODS if not name.startswith("sinkpruner") and f"`{name}`" not in rules] == []
