"""`sinkpruner-heads` is SinkPruner whose stages read the chosen heads: those of its numpy reference.

`sinkpruner-text-heads` has the same stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune import BudgetError, UsageError
from sinkprune.contract.budgets import Budget, Share, parse_budget, prune_layers
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import to_json
from sinkprune.export.dialects import opset24
from sinkprune.export.methods import load_method
from sinkprune.export.methods.heads import ChosenHeads, LayerHeads, read_heads, write_heads
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.pruning.select import every_text_row
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.chosen_heads import WITH_HEADS, chosen_heads, heads_by_layer
from support.programs.commands import assert_refused, run
from support.references import reference

Array = np.ndarray[Any, Any]
SHAPES = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
CHOSEN = {"mha": (1, 2), "gqa": (0, 4, 5), "mqa": (3,)}
HEAD_DIM, KEPT = 16, 7
RETAIN_64 = parse_budget("llava", "retain-64")


def budget_of(**options: Any) -> Budget:
    return Budget(Share(1, 2), Share(1, 2), (Share(KEPT, 1000),) * 3, **options)


def stage(shape: str, rows: int, seed: int = 0) -> dict[str, Array]:
    """Random inputs of a select, without the indices."""
    rng, (heads, key_heads) = np.random.default_rng(seed), SHAPES[shape]
    sizes = {
        "hidden": (1, rows, heads * HEAD_DIM),
        "cos": (1, rows, HEAD_DIM // 2),
        "sin": (1, rows, HEAD_DIM // 2),
        "query": (1, heads, rows, HEAD_DIM),
        "key": (1, key_heads, rows, HEAD_DIM),
    }
    return {name: 1.5 * rng.normal(size=size) for name, size in sizes.items()}


def assert_equals_reference(
    budget: Budget,
    shape: str,
    inputs: dict[str, Array],
    visual: list[int],
    text: list[int],
    heads: tuple[int, ...] | None = None,
    *,
    precision: str = "fp32",
    library: str = "ort-cpu",
) -> list[int]:
    """Compare the kept rows with the reference's, and return them."""
    heads = CHOSEN[shape] if heads is None else heads
    dtype = {"fp32": np.float32, "fp16": np.float16}[precision]
    inputs = {name: array.astype(dtype) for name, array in inputs.items()}
    model = graphs.language_model(*SHAPES[shape], HEAD_DIM)
    select = graphs.asked_select(model, KEPT, budget, every_text_row, precision, heads, library)
    out = select(**inputs, visual_index=np.array(visual, np.int64), text_index=np.array(text, np.int64))
    wide = budget.scores_over == "visual_keys"
    scores = reference.text_attention(
        inputs["query"][0], inputs["key"][0], visual, text, visual_keys=wide, heads=heads
    )
    keep = reference.keep_rows(scores, inputs["hidden"].shape[1], visual, KEPT)
    assert out["keep_index"].tolist() == keep
    np.testing.assert_array_equal(out["hidden_out"], inputs["hidden"][:, keep])
    return keep


@pytest.mark.parametrize("text", [0, 1, 6])
@pytest.mark.parametrize("scores_over", ["all_keys", "visual_keys"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_stages_equal_the_reference(precision: str, shape: str, scores_over: str, text: int) -> None:
    inputs, visual, asking = stage(shape, 44 + text, seed=text), list(range(4, 44)), list(range(44, 44 + text))
    budget = budget_of(scores_over=scores_over)
    keep = assert_equals_reference(budget, shape, inputs, visual, asking, precision=precision)
    assert len(keep) == 4 + KEPT + text


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.sets(st.integers(0, 3), min_size=1),
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.sampled_from([0.0, 1e-30, 1.0, 1e15]),
    st.integers(0, 4),
)
def test_ties_duplicates_zeros_and_extremes(
    shape: str, heads: set[int], kinds: list[int], scale: float, text: int
) -> None:
    """Rows of one kind have the same keys, those of kind 0 zeros; queries are tiny, zero or large."""
    inputs, end = stage(shape, 2 + len(kinds) + text, seed=1), 2 + len(kinds)
    same = stage(shape, 4, seed=2)["key"]
    same[:, :, 0] = 0
    inputs["key"][:, :, 2:end] = same[:, :, kinds]
    inputs["query"] *= scale
    assert_equals_reference(
        budget_of(), shape, inputs, list(range(2, end)), list(range(end, end + text)), tuple(sorted(heads))
    )


@pytest.mark.parametrize("method", WITH_HEADS)
def test_no_stage_and_no_sanitizer_is_refused(method: str) -> None:
    model = replace(graphs.language_model(), num_layers=32)
    heads: dict[int, tuple[int, ...]] = dict.fromkeys(prune_layers(32), ())
    facts = PlanFacts(model, 576, 48, PRECISIONS["fp32"], opset24, heads=heads)
    with pytest.raises(BudgetError, match="no layer has a chosen head, so the method has no stage"):
        load_method(method)(facts, parse_budget("llava", "retain-64+no-sanitizer"))


@pytest.mark.parametrize("method", WITH_HEADS)
def test_without_chosen_heads_the_error_names_the_command(method: str) -> None:
    facts = PlanFacts(replace(graphs.language_model(), num_layers=32), 576, 48, PRECISIONS["fp32"], opset24)
    with pytest.raises(
        BudgetError,
        match=r"'sinkpruner-heads' and 'sinkpruner-text-heads' need .*sinkprune-calibrate attention BUNDLE .*--heads",
    ):
        load_method(method)(facts, RETAIN_64)


@pytest.fixture(scope="module")
def root(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that `sinkprune-export --heads` wrote, next to its file of heads."""
    folder = tmp_path_factory.mktemp("heads")
    config = json.loads((checkpoint("gqa-112") / "config.json").read_text())["text_config"]
    write_heads(folder / "heads.json", chosen_heads(config["num_hidden_layers"], config["num_attention_heads"]))
    outcome = export(checkpoint, folder / "bundle", "--heads", folder / "heads.json")
    assert outcome.code == 0, outcome.stderr
    return folder / "bundle"


def export(checkpoint: Callable[[str], Path], output: Path, *options: Any, only_plain: bool = False) -> Any:
    methods = "sinkpruner" if only_plain else "sinkpruner,sinkpruner-heads,sinkpruner-text-heads"
    chosen = ("--methods", methods, "--budgets", "retain-64")
    return run("sinkprune-export", checkpoint("gqa-112"), "-o", output, *chosen, *options)


def test_the_manifest_has_the_heads(root: Path) -> None:
    model, plans = read_bundle(root).manifest.language_model, read_bundle(root).manifest.plans
    by_layer = heads_by_layer(model.num_layers, model.num_heads)
    for method in WITH_HEADS:
        assert plans[method]["retain-64"].heads == {str(layer): own for layer, own in by_layer.items()}
    assert plans["sinkpruner"]["retain-64"].heads is None


def test_exports_without_heads_or_for_another_method_are_refused(
    checkpoint: Callable[[str], Path], root: Path, tmp_path: Path
) -> None:
    heads = ("--heads", root.parent / "heads.json")
    said = "sinkprune-calibrate attention BUNDLE --data FILE.jsonl --heads heads.json"
    assert_refused(export(checkpoint, tmp_path / "out"), "'sinkpruner-heads' and 'sinkpruner-text-heads' need", said)
    refused = export(checkpoint, tmp_path / "out", *heads, only_plain=True)
    assert_refused(refused, "found --heads, which are for methods sinkpruner-heads and")
    assert_refused(export(checkpoint, tmp_path / "out", "--heads", tmp_path / "none.json"), "none.json", said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads_version": 2}, "have the version 2, this sinkprune reads 1"),
        ({"heads_version": None}, "no file of heads"),
        ({"more": 3}, "unknown field 'more'"),
    ],
)
def test_files_that_are_no_heads_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    data = {**to_json(chosen_heads(8, 4)), **change}
    (tmp_path / "heads.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=said):
        read_heads(tmp_path / "heads.json")


@pytest.mark.parametrize(
    ("layers", "chosen", "count", "said"),
    [
        (
            (2, 6, 15),
            (0,),
            4,
            "the heads are of layers 2, 6, 15 of 'small', and this decoder is pruned after layers 1",
        ),
        ((1, 2, 4), (0,), 6, "a decoder with 6 heads, 'small', and this one has 4"),
        ((1, 2, 4), (0, 4), 4, "are 0, 4, expected ascending numbers from 0 to 3"),
    ],
)
def test_heads_of_another_decoder_are_refused(
    layers: tuple[int, ...], chosen: tuple[int, ...], count: int, said: str
) -> None:
    heads = ChosenHeads(1, "small", {str(layer): LayerHeads(chosen, (1.0,) * count) for layer in layers})
    model = replace(graphs.language_model(), num_layers=8)
    assert prune_layers(8) == (1, 2, 4) and model.num_heads == 4
    with pytest.raises(UsageError, match=said):
        heads.of(model)
