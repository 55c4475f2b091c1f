"""The `select_after_*` graphs of all methods keep what the numpy reference keeps, row for row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.budgets import Budget, Share, parse_budget
from sinkprune.contract.manifest import DialectName
from sinkprune.export.dialects import DIALECTS, load_dialect, opset24
from sinkprune.export.graph import Graph
from sinkprune.export.methods import load_method
from sinkprune.export.methods.in_llm import last_row, text_like_the_image
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.select import best_of_each_image, best_of_one_image, build_select, every_text_row
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.references import reference
from support.references.reference_methods import IN_LLM, TWO_STAGES, asking_rows, rows_like_the_image, tops_rows

Array = np.ndarray[Any, Any]
DTYPES = {"fp32": np.float32, "fp16": np.float16}
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
HEAD_DIM = 16
KEPT = 7
ASKING = {"fastv": last_row, "sparsevlm": text_like_the_image}
"""The querying rows of methods other than SinkPruner."""
METHODS = ("sinkpruner", *ASKING)
OPTIONS: list[dict[str, Any]] = [{}, {"positions": "compact"}, {"scores_over": "visual_keys"}]


def budget_of(kept: int, **options: Any) -> Budget:
    """A budget that keeps `kept` visual tokens of an image of 1000."""
    return Budget(Share(1, 2), Share(1, 2), (Share(kept, 1000),) * 3, **options)


def stage(
    heads: str, rows: int, dtype: Any = np.float32, seed: int = 0, head_dim: int = HEAD_DIM
) -> dict[str, Array]:
    """Return random inputs of a select, without the indices."""
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


def assert_equals_reference(
    budget: Budget,
    heads: str,
    inputs: dict[str, Array],
    visual: list[int],
    text: list[int],
    precision: str = "fp32",
    method: str = "sinkpruner",
) -> list[int]:
    """Compare every output with the reference, and return the surviving rows."""
    model = graphs.language_model(*HEADS[heads], HEAD_DIM)
    if method == "sinkpruner":
        run = graphs.select(model, budget, 1000, precision)
    else:
        run = graphs.asked_select(model, KEPT, budget, ASKING[method], precision)
    out = run(**inputs, visual_index=np.array(visual, np.int64), text_index=np.array(text, np.int64))
    scores = reference.text_attention(
        inputs["query"][0],
        inputs["key"][0],
        visual,
        asking_rows(method, inputs["hidden"][0], visual, text),
        visual_keys=budget.scores_over == "visual_keys",
    )
    rows = inputs["hidden"].shape[1]
    keep = reference.keep_rows(scores, rows, visual, budget.stages[0].of(1000))
    assert out["keep_index"].tolist() == keep
    assert out["visual_index_out"].tolist() == [place for place, row in enumerate(keep) if row in visual]
    assert out["text_index_out"].tolist() == [place for place, row in enumerate(keep) if row in text]
    np.testing.assert_array_equal(out["hidden_out"], inputs["hidden"][:, keep])
    positions = keep if budget.positions == "keep" else list(range(len(keep)))
    np.testing.assert_array_equal(out["cos_out"], inputs["cos"][:, positions])
    np.testing.assert_array_equal(out["sin_out"], inputs["sin"][:, positions])
    assert all(out[name].dtype == DTYPES[precision] for name in ("hidden_out", "cos_out", "sin_out"))
    assert all(out[name].dtype == np.int64 for name in ("keep_index", "visual_index_out", "text_index_out"))
    return keep


@pytest.mark.parametrize("text", [0, 1, 6])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_outputs_equal_the_reference(
    method: str, precision: str, heads: str, option: dict[str, Any], text: int
) -> None:
    inputs = stage(heads, 4 + 40 + text, DTYPES[precision], seed=text)
    visual, questions = list(range(4, 44)), list(range(44, 44 + text))
    keep = assert_equals_reference(budget_of(KEPT, **option), heads, inputs, visual, questions, precision, method)
    assert len(keep) == 4 + KEPT + text


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("visual", [0, 1, KEPT - 1, KEPT])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_dropped_where_no_more_than_the_kept_are_left(
    method: str, visual: int, option: dict[str, Any]
) -> None:
    rows, budget = list(range(visual + 7)), budget_of(KEPT, **option)
    inputs = stage("mha", len(rows))
    keep = assert_equals_reference(budget, "mha", inputs, rows[3 : 3 + visual], rows[3 + visual :], method=method)
    assert keep == rows


@pytest.mark.parametrize("sign", [1, -1])
def test_logits_beyond_fp16_are_computed_in_fp32(sign: int) -> None:
    inputs = stage("mha", 40, np.float16, seed=3)
    # Adds 90000 to every product of a query and a key; fp16 ends at 65504.
    inputs["query"][..., 0], inputs["key"][..., 0] = 300, sign * 300
    assert_equals_reference(budget_of(KEPT), "mha", inputs, list(range(4, 34)), list(range(34, 40)), "fp16")


@pytest.mark.parametrize("scores_over", ["all_keys", "visual_keys"])
def test_fp16_rows_are_moved_and_never_computed_with(scores_over: str) -> None:
    """The CPU has no fp16 arithmetic to be wrong with."""
    budget = budget_of(KEPT, scores_over=scores_over, positions="compact")
    found = graphs.operators_on_fp16(graphs.select_graph(graphs.language_model(), budget, 1000, "fp16"))
    assert found <= {"Shape", "Cast", "Gather", "Slice"}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("scores_over", ["all_keys", "visual_keys"])
def test_equal_keys_tie_wherever_they_stand(scores_over: str, heads: str) -> None:
    budget = budget_of(KEPT, scores_over=scores_over)

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.integers(-1, 3), min_size=1, max_size=24),
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([0.0, 1e-30, 1.0, 1e15]),
    )
    def holds(kinds: list[int], text: int, before: int, scale: float) -> None:
        """Rows of kind -1 are text between visual rows; those of one other kind have the same keys."""
        first_text = before + len(kinds)
        inputs = stage(heads, first_text + text, seed=1)
        inputs["query"] *= scale
        same = stage(heads, 4, seed=2)["key"]
        same[:, :, 0] = 0
        visual = [before + place for place, kind in enumerate(kinds) if kind >= 0]
        for row in visual:
            inputs["key"][:, :, row] = same[:, :, kinds[row - before]]
        if inputs["hidden"].shape[1] > 0:
            assert_equals_reference(budget, heads, inputs, visual, list(range(first_text, first_text + text)))

    holds()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("images", [1, 3])
def test_no_value_grows_with_the_square_of_the_visual_rows(images: int, dialect: DialectName, tmp_path: Path) -> None:
    """Three clips have some 13000: a table of them squared would take 0.7 GB."""
    graph, size = Graph("select", PRECISIONS["fp32"], load_dialect(dialect)), 1000
    model = graphs.language_model(*HEADS["mha"], HEAD_DIM)
    choice = best_of_one_image(300) if images == 1 else best_of_each_image(images)
    build_select(graph, graphs.facts_of(model), choice, budget_of(1), every_text_row)
    path = tmp_path / graph.save(tmp_path, "graph.onnx").file
    inputs = stage("mha", size + 3, seed=1)
    inputs |= {"visual_index": np.arange(size), "text_index": np.arange(size, size + 3)}
    if images > 1:
        inputs |= {"visual_group": np.arange(size) * images // size, "quota": np.arange(300) // 100}
    onnx_model = onnx.load(path)
    names = [name for node in onnx_model.graph.node for name in node.output if name]
    del onnx_model.graph.output[:]
    onnx_model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = onnxruntime.InferenceSession(onnx_model.SerializeToString()).run(names, inputs)
    assert max(value.size for value in values) < size**2 // 4


def kept_of_each(group: Array, counts: list[int], visual: list[int], choose: Callable[..., list[int]]) -> set[int]:
    """The rows that `choose` takes of the places of each image, as many as its count."""
    places = [(np.flatnonzero(group == image), count) for image, count in enumerate(counts)]
    return {visual[own[place]] for own, count in places for place in choose(own, count)}


@pytest.mark.parametrize("scores_over", ["all_keys", "visual_keys"])
@pytest.mark.parametrize("seed", range(6))
def test_each_image_keeps_its_own_quota(seed: int, scores_over: str) -> None:
    rng, rows, visual = np.random.default_rng(seed), 2, []
    sizes = rng.integers(1, 9, 3)
    quotas = [int(rng.integers(0, size + 1)) for size in sizes]
    for size in sizes:
        visual += range(rows, rows + size)
        rows += int(size) + 1
    rows += 3
    text = list(range(visual[-1] + 1, rows))
    inputs = stage("gqa", rows, seed=seed)
    # Some are alike, within an image and across images: the earlier wins.
    alike = [visual[place] for place in (0, len(visual) // 3, len(visual) // 2, -1)]
    inputs["key"][:, :, alike] = inputs["key"][:, :, alike[:1]]
    group = np.repeat(np.arange(3), sizes)
    model = graphs.language_model(*HEADS["gqa"], HEAD_DIM)
    # A prompt may have fewer images than its bundle takes
    out = graphs.quota_select(model, 3 + seed % 2, budget_of(1, scores_over=scores_over))(
        **inputs,
        visual_index=np.array(visual),
        text_index=np.array(text),
        visual_group=group,
        quota=np.repeat(np.arange(3), quotas),
    )
    wide = scores_over == "visual_keys"
    scores = reference.text_attention(inputs["query"][0], inputs["key"][0], visual, text, visual_keys=wide)
    kept = kept_of_each(group, quotas, visual, lambda own, quota: reference.largest(scores[own], quota))
    keep = [row for row in range(rows) if row not in visual or row in kept]
    assert out["keep_index"].tolist() == keep
    assert out["visual_index_out"].tolist() == [place for place, row in enumerate(keep) if row in kept]
    assert out["text_index_out"].tolist() == [place for place, row in enumerate(keep) if row in text]
    np.testing.assert_array_equal(out["hidden_out"], inputs["hidden"][:, keep])


@pytest.mark.parametrize("method", [*IN_LLM, "vscan"])
def test_methods_ask_the_rows_they_should(method: str) -> None:
    """The graph of the plan itself."""
    plan = graphs.method_plan(method, 576, 32, parse_budget("llava", "retain-192"))
    (layer, graph), *_ = plan.select_after.items()
    assert layer == {**IN_LLM, **TWO_STAGES}[method].cuts[0]
    inputs = stage("mha", 610, head_dim=8)
    visual, text = list(range(4, 580)), list(range(580, 610))
    out = graphs.loaded(graph)(**inputs, visual_index=np.array(visual), text_index=np.array(text))
    asking = asking_rows(method, inputs["hidden"][0], visual, text)
    scores = reference.text_attention(inputs["query"][0], inputs["key"][0], visual, asking)
    assert out["keep_index"].tolist() == reference.keep_rows(scores, 610, visual, plan.kept.resolve(576).stages[0])


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("sizes", [(40,), (30, 9, 21)])
def test_stages_of_tops_equal_the_reference(sizes: tuple[int, ...], alike: bool) -> None:
    """Each image has a count of its own. A prompt may have fewer images than its bundle takes."""
    rng, start, end = np.random.default_rng(len(sizes)), 4, 4 + sum(sizes)
    rows, counts = end + 5, [size // 4 for size in sizes]
    model = replace(graphs.language_model(), num_layers=32)
    facts = PlanFacts(model, 576, 16, PRECISIONS["fp32"], opset24, images=1 if len(sizes) == 1 else 4)
    plan = load_method("tops")(facts, parse_budget("llava", "retain-64"))
    assert [*plan.select_after] == [12, 24]
    inputs = stage("mha", rows, seed=len(sizes), head_dim=8)
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
    scores = reference.text_attention(inputs["query"][0], inputs["key"][0], visual, asking)
    kept = kept_of_each(group, counts, visual, lambda own, count: tops_rows(hidden[start + own], scores[own], count))
    assert found == [row for row in range(rows) if row not in visual or row in kept]
