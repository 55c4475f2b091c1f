"""Every method before the LLM keeps what its numpy reference keeps, index for index and row for row."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget, parse_budget
from sinkprune.contract.manifest import DialectName
from sinkprune.export.pruning.functions import ROUNDS
from sinkprune.export.pruning.plan import MAX_ROUNDS
from support.models import graphs
from support.models.token_features import KINDS, exact_rows, token_features
from support.references.kept_tokens import SANITIZING, assert_keeps
from support.references.reference_methods import READ_THE_QUESTION

Array = np.ndarray[Any, Any]
WIDTH = graphs.language_model().hidden_size
LENGTHS = (1.0, 0.0, 2.0**60, 2.0**-60, 4.0, 0.5)
RETAIN_64, RETAIN_192 = (parse_budget("llava", name) for name in ("retain-64", "retain-192"))


@cache
def made(method: str, n: int, d: int, budget: Budget = RETAIN_192, *form: Any) -> tuple[graphs.Run, str, Budget]:
    """A method's sanitizer, loaded, its name and its shares. `form` is a precision and a dialect."""
    plan = graphs.method_plan(method, n, d, budget, *form)
    assert plan.sanitizer is not None
    return graphs.loaded(plan.sanitizer), method, plan.kept


def inputs_of(kind: str, groups: int, n: int, d: int, count: int = 5) -> dict[str, Array]:
    """A tower's outputs, and the rows of the LLM, of the tokens of each group and of a question of `count` words."""
    draw = np.random.default_rng(3)
    rows = {"embeddings": draw.normal(size=(groups, n, WIDTH)), "question": draw.normal(size=(count, WIDTH))}
    return token_features(kind, groups, n, d) | rows


@pytest.mark.parametrize(("precision", "dialect"), [("fp32", "opset24"), ("fp16", "opset20")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", SANITIZING)
def test_selection_equals_the_reference(method: str, kind: str, precision: str, dialect: DialectName) -> None:
    inputs = inputs_of(kind, 2, 144, 48)
    if method in READ_THE_QUESTION and kind not in ("random", "outliers"):
        # CDPruner compares tokens as the LLM receives them.
        inputs["embeddings"] = inputs["tokens"][:, :, :WIDTH]
    assert_keeps(*made(method, 144, 48, RETAIN_192, precision, dialect), inputs, precision)


@pytest.mark.parametrize("budget", ["retain-192", "retain-32", "retain-64+no-sanitizer", "retain-64+keep-outliers"])
@pytest.mark.parametrize("method", SANITIZING)
def test_small_and_large_counts(method: str, budget: str) -> None:
    for n in (2, 5, 12, 49, 50, 64):
        plan = graphs.method_plan(method, n, 8, parse_budget("llava", budget))
        if plan.sanitizer is None:
            assert method.startswith("sinkpruner") and budget.endswith("no-sanitizer")
        else:
            assert_keeps(graphs.loaded(plan.sanitizer), method, plan.kept, inputs_of("random", 2, n, 8))


@pytest.mark.parametrize("method", [method for method in SANITIZING if not method.startswith("sinkpruner+")])
def test_ties_duplicates_zeros_and_extremes(method: str) -> None:
    rows = [row for row in product((-1.0, 0.0, 1.0), repeat=4) if np.count_nonzero(row) in (0, 1, 4)]
    received = exact_rows(np.random.default_rng(0), 1, 6, WIDTH)[0] * np.array(LENGTHS)[:, None]
    token = st.tuples(
        st.sampled_from(rows), st.sampled_from([1.0, 3.0, 0.1, 300.0]), st.sampled_from([0.0, 1.0, 2.0, 300.0])
    )
    drawn_token = st.tuples(token, st.sampled_from([0.0, 0.25, -1.0, 1e38]), st.integers(0, 5))

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.lists(drawn_token, min_size=25, max_size=25), st.lists(st.integers(0, 5), min_size=4, max_size=4))
    def holds(drawn: list[Any], asked: list[int]) -> None:
        inputs = {
            "tokens": np.array([[np.array(row) * scale for (row, scale, _), *_ in drawn]]),
            "norms": np.array([[norm for (_, _, norm), *_ in drawn]]),
            "salience": np.array([[salience for _, salience, _ in drawn]]),
            "embeddings": received[[kind for *_, kind in drawn]][None],
            "question": received[asked],
        }
        assert_keeps(*made(method, 25, 4), inputs)

    holds()


@pytest.mark.parametrize("words", [1, 2, 8])
@pytest.mark.parametrize("method", [*READ_THE_QUESTION, "sinkpruner-text"])
def test_questions_of_any_length(method: str, words: int) -> None:
    assert_keeps(*made(method, 64, 16), inputs_of("random", 1, 64, 16, words))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]), st.booleans())
def test_prunesid_on_random_tokens_of_few_directions(seed: int, rank: int, tied: bool) -> None:
    """More tokens are alike than are kept, and there are fewer directions than components."""
    draw, inputs = np.random.default_rng(seed), inputs_of("random", 1, 48, 8)
    salience = draw.random((1, 48))
    inputs["tokens"] = (draw.standard_normal((48, rank)) @ draw.standard_normal((rank, 8)))[None].astype(np.float32)
    inputs["salience"] = salience.round(1) if tied else salience
    assert_keeps(*made("prunesid", 48, 8), inputs)


@pytest.mark.parametrize("method", ["scope", *READ_THE_QUESTION])
def test_a_round_takes_few_bytes_and_no_loop(method: str, tmp_path: Path) -> None:
    """Runtimes reject graphs within nodes, and functions that expand to more than 50,000 nodes."""
    graph = graphs.method_plan(method, 576, 16, RETAIN_192).sanitizer
    assert graph is not None
    model = onnx.load(tmp_path / graph.save(tmp_path, "graph.onnx").file)
    (rounds,) = (function for function in model.functions if function.domain == ROUNDS)
    assert sum(node.op_type == rounds.name for node in model.graph.node) == 203
    assert len(rounds.node) * MAX_ROUNDS < 40_000, len(rounds.node)
    assert (tmp_path / "graph.onnx").stat().st_size < 203 * 340


@pytest.mark.parametrize("method", [*SANITIZING, "random"])
def test_fp16_tokens_are_never_computed_with(method: str) -> None:
    """The CPU has no fp16 arithmetic to be wrong with; elsewhere a squared norm would pass fp16's maximum."""
    found = graphs.operators_on_fp16(graphs.method_plan(method, 64, 8, RETAIN_64, "fp16").sanitizer)
    assert found <= {"Shape", "Cast", "CastLike", "GatherND", "Concat"}
