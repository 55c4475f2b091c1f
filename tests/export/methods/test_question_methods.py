"""`cdpruner` and `mmtok` keep what their numpy references keep, for groups of one size and of any."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import FAMILIES, Budget, parse_budget
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.manifest import DialectName
from sinkprune.export.dialects import DIALECTS, load_dialect
from sinkprune.export.methods import load_method
from sinkprune.export.pruning.functions import ROUNDS
from sinkprune.export.pruning.plan import MAX_ROUNDS, PlanFacts, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.token_features import KINDS, exact_rows, token_features
from support.references.question_methods import READ_THE_QUESTION

Array = np.ndarray[Any, Any]
MODEL = replace(graphs.language_model(32, 32, 4), rope_sections=(1, 1, 0))
WIDTH = graphs.language_model().hidden_size
LENGTHS = (1.0, 0.0, 2.0**60, 2.0**-60, 4.0, 0.5)
RETAIN_64, RETAIN_192 = (parse_budget("llava", name) for name in ("retain-64", "retain-192"))
OF_QWEN = FAMILIES["qwen3-vl"].budgets
READING = ("tokens", "embeddings", "question")


def words(groups: int, n: int, count: int = 5, width: int = WIDTH, seed: int = 3) -> dict[str, Array]:
    """Rows of the LLM, of the tokens of each group and of a question."""
    rng = np.random.default_rng(seed)
    rows = {"embeddings": rng.normal(size=(groups, n, width)), "question": rng.normal(size=(count, width))}
    return {name: array.astype(np.float32) for name, array in rows.items()}


def assert_equals_reference(
    method: str, budget: Budget, inputs: dict[str, Array], precision: str = "fp32"
) -> list[list[int]]:
    """Compare a method's graph with its reference; returns what each group kept."""
    dtype = {"fp32": np.float32, "fp16": np.float16}[precision]
    inputs = {name: array.astype(dtype if name in READING else np.float32) for name, array in inputs.items()}
    _, n, d = inputs["tokens"].shape
    out = graphs.method_sanitizer(method, n, d, budget, precision)(**inputs)
    k = graphs.tokens_into_llm(n, budget)
    for group, index in enumerate(out["kept_index"].tolist()):
        rows, expected = READ_THE_QUESTION[method](
            inputs["tokens"][group], inputs["embeddings"][group], inputs["question"], k
        )
        assert index == expected
        np.testing.assert_array_equal(out["kept_tokens"][group], rows)
    return out["kept_index"].tolist()


@pytest.mark.parametrize(("method", "kind", "precision"), [*product(READ_THE_QUESTION, KINDS, ("fp32", "fp16"))])
def test_the_choice_equals_the_reference(method: str, kind: str, precision: str) -> None:
    inputs = token_features(kind, 2, 144) | words(2, 144)
    if kind in ("tied", "duplicated", "zero rows", "all zero"):
        # CDPruner compares tokens as the LLM receives them.
        inputs["embeddings"] = inputs["tokens"][:, :, :WIDTH]
    for index in assert_equals_reference(method, RETAIN_192, inputs, precision):
        assert len(set(index)) == len(index) == graphs.tokens_into_llm(144, RETAIN_192) > 48


@pytest.mark.parametrize("method", READ_THE_QUESTION)
def test_ties_duplicates_zeros_and_extremes(method: str) -> None:
    rows = exact_rows(np.random.default_rng(0), 1, 6, WIDTH)[0]
    kinds = np.array([row * length for row, length in zip(rows, LENGTHS, strict=True)])

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=24, max_size=24),
        st.lists(st.integers(0, 5), min_size=4, max_size=4),
    )
    def holds(drawn: list[tuple[int, int]], asked: list[int]) -> None:
        inputs = token_features("tied", 1, 24, 8)
        inputs["tokens"] = kinds[[number for number, _ in drawn]][None, :, :8]
        inputs["embeddings"] = kinds[[number for _, number in drawn]][None]
        inputs["question"] = kinds[asked]
        assert_equals_reference(method, RETAIN_192, inputs)

    holds()


@pytest.mark.parametrize("method", READ_THE_QUESTION)
def test_fp16_is_never_computed_with(method: str) -> None:
    found = graphs.operators_on_fp16(graphs.method_plan(method, 64, 8, RETAIN_64, "fp16").sanitizer)
    assert found <= {"Shape", "Cast", "CastLike", "GatherND", "Concat"}


def facts_of(most: int, dialect: DialectName = "opset24", **more: Any) -> PlanFacts:
    """Pictures of up to `most` tokens, of width 16."""
    tokens = VariableTokens(most, 784, most * more.get("groups", 1))
    return PlanFacts(MODEL, tokens, 16, PRECISIONS["fp32"], load_dialect(dialect), **more)


def of_any_size(method: str, most: int = 228, budget: Budget = OF_QWEN["prune-77.8"], **more: Any) -> Any:
    """The plan for pictures of up to `most` tokens."""
    return load_method(method)(facts_of(most, **more), budget)


def features(groups: int, n: int) -> dict[str, Array]:
    return token_features("random", groups, n, 16) | words(groups, n, 5, MODEL.hidden_size, seed=n)


@pytest.mark.parametrize("library", ["ort-cpu", "openvino"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("method", READ_THE_QUESTION)
def test_one_sanitizer_keeps_the_references_tokens_at_any_n(method: str, dialect: str, library: str) -> None:
    plan = of_any_size(method, dialect=dialect)
    run = graphs.loaded(plan.sanitizer, library)
    for n in (1, 2, 3, 5, 19, 101, 228):
        inputs = features(1, n)
        arrays = (inputs["tokens"][0], inputs["embeddings"][0], inputs["question"])
        rows, index = READ_THE_QUESTION[method](*arrays, plan.kept.resolve(n).kept, qwen=True)
        out = run(**inputs)
        assert out["kept_index"].tolist() == [index], n
        np.testing.assert_array_equal(out["kept_tokens"], rows[None])


def test_words_are_compared_at_the_temperature_of_the_family() -> None:
    inputs = features(1, 101)
    # Nearly equal rows, so that no word has a token of its own.
    inputs["embeddings"] = 0.1 * inputs["embeddings"] + inputs["embeddings"][:, :1]
    arrays = (inputs["tokens"][0], inputs["embeddings"][0], inputs["question"])
    plan = of_any_size("mmtok")
    llava, qwen = (
        READ_THE_QUESTION["mmtok"](*arrays, plan.kept.resolve(101).kept, qwen=qwen)[1] for qwen in (False, True)
    )
    assert graphs.loaded(plan.sanitizer)(**inputs)["kept_index"].tolist() == [qwen] != [llava]


@pytest.mark.parametrize("method", READ_THE_QUESTION)
def test_a_clips_frames_are_one_group_or_apart(method: str) -> None:
    inputs = features(4, 12)
    inputs["deepstack"] = np.random.default_rng(7).standard_normal((4, 12, 32)).astype(np.float32)
    whole = {name: array.reshape(1, 48, *array.shape[2:]) for name, array in inputs.items() if name != "question"}
    whole["question"] = inputs["question"]
    clip = {"most": 12, "groups": 4, "joined": True, "deepstack": 2}
    joined = graphs.loaded(of_any_size(method, **clip).sanitizer)(**inputs)
    alone = graphs.loaded(of_any_size(method, most=48, deepstack=2).sanitizer)(**whole)
    for name, array in alone.items():
        np.testing.assert_array_equal(joined[name], array)
    np.testing.assert_array_equal(joined["kept_deepstack"][0], whole["deepstack"][0, joined["kept_index"][0]])

    per_frame = replace(OF_QWEN["prune-77.8"], frames="apart")
    frames = graphs.loaded(of_any_size(method, budget=per_frame, **clip).sanitizer)(**inputs)
    each = graphs.loaded(of_any_size(method, most=12, deepstack=2).sanitizer)
    for group in range(4):
        one = {name: array[group : group + 1] for name, array in inputs.items() if name != "question"}
        for name, array in each(**one, question=inputs["question"]).items():
            np.testing.assert_array_equal(frames[name][group], array[0])


@pytest.mark.parametrize("method", READ_THE_QUESTION)
def test_more_rounds_than_a_graph_has_are_rejected_with_the_size_that_fits(method: str) -> None:
    most, budget = 6000, OF_QWEN["prune-77.8"]
    wanted = load_method("divprune")(facts_of(most), budget).kept.resolve(most).kept
    fit = most * MAX_ROUNDS // wanted
    assert wanted > MAX_ROUNDS
    with pytest.raises(BudgetError, match=rf"one by one, at most {MAX_ROUNDS}\. Allow up to {fit} tokens only"):
        of_any_size(method, most=most)
    of_any_size(method, most=fit)


@pytest.mark.parametrize("method", READ_THE_QUESTION)
def test_a_round_takes_few_bytes_and_no_loop(method: str, tmp_path: Path) -> None:
    """Runtimes reject graphs within nodes, and functions that expand to more than 50,000 nodes."""
    graphs.method_plan(method, 576, 16, RETAIN_192).sanitizer.save(tmp_path, "graph.onnx")  # type: ignore[union-attr]
    model = onnx.load(tmp_path / "graph.onnx")
    (rounds,) = (function for function in model.functions if function.domain == ROUNDS)
    assert sum(node.op_type == rounds.name for node in model.graph.node) == 203
    assert len(rounds.node) * MAX_ROUNDS < 40_000, len(rounds.node)
    assert (tmp_path / "graph.onnx").stat().st_size < 203 * 320
