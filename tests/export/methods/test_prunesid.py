"""PruneSID keeps what its numpy reference keeps; test_methods.py and test_methods_of_shares.py have more of this."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget, parse_budget
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import load_method
from sinkprune.export.methods.prunesid import COMPONENTS, SUPPRESSIONS
from sinkprune.export.precision import PRECISIONS
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from support.models import graphs
from support.models.token_features import KINDS, token_features
from support.references.reference_methods import components, prunesid

Array = np.ndarray[Any, Any]
RETAIN_192, RETAIN_32 = parse_budget("llava", "retain-192"), parse_budget("llava", "retain-32")


def plan_of(n: int, d: int, budget: Budget = RETAIN_192, dialect: str = "opset24") -> PlanGraphs:
    model = replace(graphs.language_model(), num_layers=32)
    return load_method("prunesid")(PlanFacts(model, n, d, PRECISIONS["fp32"], DIALECTS[dialect]), budget)


@cache
def run_of(n: int, d: int, budget: Budget = RETAIN_192, dialect: str = "opset24") -> graphs.Run:
    """The sanitizer of a plan, loaded."""
    graph = plan_of(n, d, budget, dialect).sanitizer
    assert graph is not None
    return graphs.loaded(graph)


def kept_of(run: graphs.Run, inputs: dict[str, Array]) -> list[int]:
    """What the graph keeps of one group, which must be what the reference keeps."""
    out = run(**{name: array.astype(np.float32) for name, array in inputs.items()})
    (index,) = out["kept_index"].tolist()
    arrays = (inputs[name][0] for name in ("tokens", "norms", "salience"))
    assert index == prunesid(*arrays, len(index))[1]
    np.testing.assert_array_equal(out["kept_tokens"][0], inputs["tokens"][0, index].astype(np.float32))
    return list(index)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_dialects_keep_the_references_tokens(kind: str, dialect: str) -> None:
    kept = kept_of(run_of(144, 32, dialect=dialect), token_features(kind, 1, 144, 32))
    assert len(set(kept)) == len(kept) == graphs.tokens_into_llm(144, RETAIN_192)


def test_a_token_that_is_like_a_more_salient_one_is_suppressed() -> None:
    """Of the most salient pairs of like tokens one of each is kept, rather than both of the first two."""
    tokens = np.repeat(np.eye(6), 2, axis=0) + 1e-3 * np.random.default_rng(2).standard_normal((12, 6))
    inputs = {"tokens": tokens[None] * 3, "norms": np.ones((1, 12)), "salience": np.arange(12, 0, -1.0)[None]}
    assert kept_of(run_of(12, 6), inputs) == [0, 2, 4, 6]


def test_tokens_are_compared_with_those_that_stay_only() -> None:
    """On an arc, a token is like its neighbours alone: every other one stays, whatever suppressed its neighbour."""
    n = SUPPRESSIONS - 2
    angles = np.arange(n) * np.pi / 9
    tokens = np.zeros((n, 8))
    tokens[:, 0], tokens[:, 1] = np.cos(angles), np.sin(angles)
    tokens[:, 2] = 1.5
    inputs = {"tokens": tokens[None], "norms": np.ones((1, n)), "salience": np.arange(n, 0, -1.0)[None]}
    for budget in (RETAIN_192, parse_budget("llava", "retain-192+no-sanitizer"), RETAIN_32):
        kept_of(run_of(n, 8, budget), inputs)


def test_every_component_keeps_its_most_salient_token() -> None:
    inputs = token_features("random", 1, 144, 32)
    kept = kept_of(run_of(144, 32), inputs)
    weights = np.abs(components(inputs["tokens"][0], min(COMPONENTS, len(kept) // 4))).argmax(axis=1)
    for group in set(weights.tolist()):
        members = np.flatnonzero(weights == group)
        assert members[inputs["salience"][0, members].argmax()] in kept


def test_components_are_near_those_of_a_decomposition() -> None:
    """Three iterations are enough for directions that stand out."""
    draw = np.random.default_rng(4)
    mixed = draw.standard_normal((96, 5)) @ np.diag([8, 4, 2, 1, 0.5]) @ draw.standard_normal((5, 64))
    sigmoid = 1 / (1 + np.exp(-0.05 * mixed))
    x = sigmoid - sigmoid.mean(axis=1, keepdims=True)
    exact = np.linalg.svd(x)[0][:, :3]
    assert np.abs(np.sum(components(0.05 * mixed, 5)[:, :3] * exact, axis=0)).min() > 0.99


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]), st.booleans())
def test_random_tokens_of_few_directions(seed: int, rank: int, tied: bool) -> None:
    """More tokens are alike than are kept, and there are fewer directions than components."""
    draw = np.random.default_rng(seed)
    tokens = draw.standard_normal((48, rank)) @ draw.standard_normal((rank, 8))
    salience = draw.random(48)
    inputs = {
        "tokens": tokens[None],
        "norms": np.ones((1, 48)),
        "salience": (salience.round(1) if tied else salience)[None],
    }
    kept_of(run_of(48, 8), inputs)


def test_the_graph_of_llava_is_small(tmp_path: Path) -> None:
    graph = plan_of(576, 1024).sanitizer
    assert graph is not None
    assert (tmp_path / graph.save(tmp_path, "graph.onnx").file).stat().st_size < 80_000
