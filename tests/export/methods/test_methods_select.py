"""The selects of the methods inside the LLM: one scorer, asked by other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget
from sinkprune.contract.families import parse_budget
from sinkprune.export.pruning.select import every_text_row, last_row, text_like_the_image
from support.models import graphs
from support.references import reference
from support.references.reference_methods import IN_LLM, asking_rows, rows_like_the_image

Array = np.ndarray[Any, Any]
DTYPES = {"fp32": np.float32, "fp16": np.float16}
HEADS = {"mha": (4, 4), "gqa": (6, 2)}
HEAD_DIM = 16
KEPT = 7
ASKING = {"fastv": last_row, "pyramiddrop": last_row, "sparsevlm": text_like_the_image, "sinkpruner": every_text_row}
BUDGET = parse_budget("llava", "retain-64")


def stage(
    heads: str, rows: int, dtype: Any = np.float32, seed: int = 0, head_dim: int = HEAD_DIM
) -> dict[str, Array]:
    """Random inputs of a select, all but the indices."""
    rng = np.random.default_rng(seed)
    query_heads, key_heads = HEADS[heads]
    shapes = {
        "hidden": (1, rows, query_heads * head_dim),
        "cos": (1, rows, head_dim // 2),
        "sin": (1, rows, head_dim // 2),
        "query": (1, query_heads, rows, head_dim),
        "key": (1, key_heads, rows, head_dim),
    }
    return {name: (1.5 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}


def kept_rows(
    method: str,
    heads: str,
    inputs: dict[str, Array],
    visual: list[int],
    text: list[int],
    budget: Budget = BUDGET,
    precision: str = "fp32",
) -> list[int]:
    """The rows that survive the method's select; other outputs are moved by the same code for every method."""
    run = graphs.asked_select(graphs.language_model(*HEADS[heads], HEAD_DIM), KEPT, budget, ASKING[method], precision)
    out = run(**inputs, visual_index=np.array(visual, np.int64), text_index=np.array(text, np.int64))
    np.testing.assert_array_equal(out["hidden_out"], inputs["hidden"][:, out["keep_index"]])
    rows: list[int] = out["keep_index"].tolist()
    return rows


def expected_rows(
    method: str, inputs: dict[str, Array], visual: list[int], text: list[int], *, visual_keys: bool = False
) -> list[int]:
    """The same by the reference."""
    asking = asking_rows(method, inputs["hidden"][0], visual, text)
    scores = reference.text_attention(inputs["query"][0], inputs["key"][0], visual, asking, visual_keys=visual_keys)
    return reference.keep_rows(scores, inputs["hidden"].shape[1], visual, KEPT)


@pytest.mark.parametrize("text", [0, 1, 9])
@pytest.mark.parametrize("option", ["", "+visual-keys"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("method", IN_LLM)
def test_selection_equals_the_reference(method: str, heads: str, option: str, text: int) -> None:
    inputs = stage(heads, 4 + 40 + text, seed=text)
    visual, asked = list(range(4, 44)), list(range(44, 44 + text))
    budget = parse_budget("llava", f"retain-64{option}")
    expected = expected_rows(method, inputs, visual, asked, visual_keys=bool(option))
    assert kept_rows(method, heads, inputs, visual, asked, budget) == expected
    assert len(expected) == 4 + KEPT + text


@pytest.mark.parametrize("method", IN_LLM)
def test_fp16_inputs_are_scored_in_fp32(method: str) -> None:
    inputs = stage("gqa", 50, np.float16)
    visual, text = list(range(5, 41)), list(range(41, 50))
    expected = expected_rows(method, inputs, visual, text)
    assert kept_rows(method, "gqa", inputs, visual, text, precision="fp16") == expected


@pytest.mark.parametrize("method", IN_LLM)
@pytest.mark.parametrize("visual", [0, 1, KEPT])
def test_nothing_happens_where_no_more_than_the_kept_are_left(method: str, visual: int) -> None:
    inputs = stage("mha", visual + 7)
    rows = list(range(visual + 7))
    assert kept_rows(method, "mha", inputs, rows[3 : 3 + visual], rows[3 + visual :]) == rows


@pytest.mark.parametrize("method", IN_LLM)
def test_ties_duplicates_and_zero_rows(method: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.integers(0, 3), min_size=1, max_size=24),
        st.lists(st.integers(0, 5), max_size=6),
    )
    def holds(keys: list[int], kinds: list[int]) -> None:
        """Visual rows of one key kind are equal keys; hidden rows are one of four directions or zero."""
        size = 2 + len(keys) + len(kinds)
        inputs = stage("gqa", size, seed=1)
        same = stage("gqa", 4, seed=2)["key"]
        same[:, :, 0] = 0
        visual, text = list(range(2, 2 + len(keys))), list(range(2 + len(keys), size))
        # Unit vectors: their cosines, and means of eight of them, are exact.
        inputs["hidden"][:] = 0
        for row, kind in zip(range(2, size), [*keys, *kinds], strict=True):
            inputs["key"][:, :, row] = same[:, :, kind] if row in visual else inputs["key"][:, :, row]
            if kind < 4:
                inputs["hidden"][0, row, kind] = 2.0**kind
        assert kept_rows(method, "gqa", inputs, visual, text) == expected_rows(method, inputs, visual, text)

    holds()


@pytest.mark.parametrize("method", ["fastv", "pyramiddrop"])
def test_only_the_last_row_asks(method: str) -> None:
    inputs = stage("mha", 60)
    visual, text = list(range(2, 50)), list(range(50, 60))
    before = kept_rows(method, "mha", inputs, visual, text)
    inputs["query"][:, :, :59] = 0
    assert kept_rows(method, "mha", inputs, visual, text) == before
    assert kept_rows("sinkpruner", "mha", inputs, visual, text[:1]) != before


def test_text_unlike_the_image_does_not_ask_sparsevlm() -> None:
    inputs = stage("mha", 60)
    visual, text = list(range(2, 50)), list(range(50, 60))
    like = rows_like_the_image(inputs["hidden"][0], visual, text)
    assert 0 < len(like) < len(text)
    before = kept_rows("sparsevlm", "mha", inputs, visual, text)
    inputs["query"][:, :, [row for row in text if row not in like]] = 0
    assert kept_rows("sparsevlm", "mha", inputs, visual, text) == before
    inputs["query"][:, :, like] = 0
    assert kept_rows("sparsevlm", "mha", inputs, visual, text) != before


@pytest.mark.parametrize("option", ["", "+visual-keys"])
def test_sparsevlm_and_sinkpruner_share_one_scorer(option: str) -> None:
    """Where every text row is as like the image as the others, they keep the same."""
    inputs = stage("gqa", 60, seed=4)
    visual, text = list(range(2, 50)), list(range(50, 60))
    inputs["hidden"][:, 50:] = inputs["hidden"][:, 50:51]
    budget = parse_budget("llava", f"retain-64{option}")
    assert kept_rows("sparsevlm", "gqa", inputs, visual, text, budget) == kept_rows(
        "sinkpruner", "gqa", inputs, visual, text, budget
    )


@pytest.mark.parametrize("method", IN_LLM)
def test_methods_ask_the_rows_they_should(method: str) -> None:
    """The plan's own graph, not one made here."""
    plan = graphs.method_plan(method, 576, 32, parse_budget("llava", "retain-192"))
    (layer, graph), *_ = plan.select_after.items()
    assert layer == {"fastv": 2, "pyramiddrop": 8, "sparsevlm": 2}[method]
    inputs = stage("mha", 610, head_dim=8)
    visual, text = list(range(4, 580)), list(range(580, 610))
    out = graphs.loaded(graph)(**inputs, visual_index=np.array(visual), text_index=np.array(text))
    asking = asking_rows(method, inputs["hidden"][0], visual, text)
    scores = reference.text_attention(inputs["query"][0], inputs["key"][0], visual, asking)
    assert out["keep_index"].tolist() == reference.keep_rows(scores, 610, visual, plan.kept.resolve(576).stages[0])
