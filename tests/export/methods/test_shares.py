"""Graphs that keep shares of N keep the counts of `Budget.resolve` for every N, or are rejected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sinkprune.contract.budgets import FAMILIES, parse_budget
from sinkprune.contract.errors import BudgetError
from sinkprune.export.dialects import opset24
from sinkprune.export.methods import load_method
from sinkprune.export.planning import plan_graphs
from sinkprune.export.pruning.plan import PlanFacts, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.programs.slow_cases import each_once
from support.references import reference

D = 16
MODEL = replace(graphs.language_model(), rope_sections=(1, 1, 2))
NAMES = [
    *FAMILIES["qwen2.5-vl"].budgets,
    "prune-66.7+raster",
    "prune-77.8+keep-outliers",
    "prune-77.8+drop-sink",
    "prune-88.9+no-diversity",
]


def facts(most: int = 480, precision: str = "fp32", images: int = 1) -> PlanFacts:
    return PlanFacts(MODEL, VariableTokens(most, 784, most), D, PRECISIONS[precision], opset24, images=images)


@pytest.mark.parametrize(("name", "precision"), each_once(NAMES, ["fp32", "fp16"]))
def test_one_sanitizer_keeps_the_references_tokens_at_any_n(name: str, precision: str) -> None:
    budget = parse_budget("qwen2.5-vl", name)
    plan = load_method("sinkpruner")(facts(480, precision), budget)
    assert replace(plan.kept, stages=()) == replace(budget, stages=()) and plan.sanitizer is not None
    run, draw = graphs.loaded(plan.sanitizer), np.random.default_rng(0)
    for n in (1, 2, 3, 4, 19, 20, 21, 99, 101, 320, 480):
        tokens = draw.standard_normal((1, n, D)).astype(PRECISIONS[precision].numpy)
        norms, salience = draw.random((2, 1, n)).astype(np.float32)
        counts = budget.resolve(n)
        out = run(tokens=tokens, norms=norms, salience=salience)
        assert out["kept_tokens"].shape == (1, counts.kept, D)
        kept, index = reference.sanitize_at(budget, tokens[0], norms[0], salience[0])
        assert out["kept_index"].tolist() == [index]
        np.testing.assert_allclose(out["kept_tokens"][0], kept, atol=1e-5 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("name", [*FAMILIES["qwen2.5-vl"].budgets, "prune-66.7+visual-keys"])
def test_one_select_keeps_its_share_of_the_images_tokens(name: str) -> None:
    budget, draw = parse_budget("qwen2.5-vl", name), np.random.default_rng(1)
    selects = load_method("sinkpruner")(facts(), budget).select_after
    run = graphs.loaded(selects[0])
    for n, seen, groups in ((480, 241, 1), (19, 10, 1), (1, 1, 1), (100, 202, 4)):
        text, model = 6, MODEL
        rows = seen + text
        query = draw.standard_normal((1, model.num_heads, rows, model.head_dim)).astype(np.float32)
        key = draw.standard_normal((1, model.num_kv_heads, rows, model.head_dim)).astype(np.float32)
        out = run(
            hidden=draw.standard_normal((1, rows, model.hidden_size)).astype(np.float32),
            cos=draw.random((1, rows, model.head_dim // 2)).astype(np.float32),
            sin=draw.random((1, rows, model.head_dim // 2)).astype(np.float32),
            query=query,
            key=key,
            visual_index=np.arange(seen),
            text_index=np.arange(seen, rows),
            norms=np.zeros((groups, n), np.float32),
        )
        (wanted,) = reference.one_stage(budget, n * groups, MODEL.num_layers, 10_000).values()
        over = budget.scores_over == "visual_keys"
        visual, asking = list(range(seen)), list(range(seen, rows))
        scores = reference.text_attention(query[0], key[0], visual, asking, visual_keys=over)
        assert out["keep_index"].tolist() == reference.keep_rows(scores, rows, visual, wanted)
        assert len(out["visual_index_out"]) == min(seen, wanted)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(
    ("name", "most", "ranked", "pixels"),
    [
        ("prune-66.7", 16384, 7372, 8534 * 784),
        ("prune-77.8+raster", 8192, 4095, 7681 * 784),
        ("prune-88.9", 20000, 4000, 19200 * 784),
    ],
)
def test_more_than_topk_gives_is_rejected_with_the_size_that_fits(
    name: str, most: int, ranked: int, pixels: int, images: int
) -> None:
    budget = parse_budget("qwen2.5-vl", name)
    with pytest.raises(BudgetError, match=f"up to {most} .* {ranked} .* 3840.*--max-pixels {pixels} or less"):
        load_method("sinkpruner")(facts(most, "fp16", images), budget)
    # Bundles in fp32 are for libraries whose TopK has no limit.
    assert len(load_method("sinkpruner")(facts(most, "fp32", images), budget).select_after) == 1
    assert len(load_method("sinkpruner")(facts(pixels // 784, "fp16", images), budget).select_after) == 1


def test_what_is_ranked_of_a_clip_is_of_all_its_frames_unless_they_stand_apart() -> None:
    clip = PlanFacts(
        MODEL, VariableTokens(1280, 784, 11 * 1000), D, PRECISIONS["fp16"], opset24, groups=11, joined=True
    )
    with pytest.raises(BudgetError, match=r"up to 11000 .* keeps 4400 in one step.*fewer --max-frames.*per-frame"):
        load_method("sinkpruner")(clip, parse_budget("qwen2.5-vl", "prune-80"))
    assert load_method("sinkpruner")(clip, parse_budget("qwen2.5-vl", "prune-80+per-frame")).sanitizer is not None


def test_compact_positions_are_rejected_where_positions_have_axes() -> None:
    with pytest.raises(BudgetError, match=r"'compact'.*several axes"):
        plan_graphs(facts(), ["fastv"], {"c": parse_budget("qwen2.5-vl", "prune-77.8+compact")}, print)
