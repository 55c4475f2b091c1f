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
from sinkprune.export.dialects import DIALECTS, load_dialect
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.plan import PlanFacts, PlanGraphs
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.token_features import KINDS, token_features
from support.references.reference_methods import prunesid

Array = np.ndarray[Any, Any]
RETAIN_192, RETAIN_32 = parse_budget("llava", "retain-192"), parse_budget("llava", "retain-32")


def plan_of(n: int, d: int, budget: Budget = RETAIN_192, dialect: str = "opset24") -> PlanGraphs:
    model = replace(graphs.language_model(), num_layers=32)
    return load_method("prunesid")(PlanFacts(model, n, d, PRECISIONS["fp32"], load_dialect(dialect)), budget)


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
