"""The file of chosen heads, and what methods with heads need of it. test_select.py compares their stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sinkprune import BudgetError, UsageError
from sinkprune.contract.budgets import parse_budget, prune_layers
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import to_json
from sinkprune.export.dialects import opset24
from sinkprune.export.methods import load_method
from sinkprune.export.methods.heads import ChosenHeads, LayerHeads, read_heads, write_heads
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.weights import PRECISIONS
from support.models import graphs
from support.models.chosen_heads import WITH_HEADS, chosen_heads, heads_by_layer
from support.programs.commands import assert_refused, run


@pytest.mark.parametrize("method", WITH_HEADS)
def test_what_leaves_no_stage_is_refused(method: str) -> None:
    facts = PlanFacts(replace(graphs.language_model(), num_layers=32), 576, 48, PRECISIONS["fp32"], opset24)
    named = "'sinkpruner-heads' and 'sinkpruner-text-heads' need .*sinkprune-calibrate attention BUNDLE .*--heads"
    with pytest.raises(BudgetError, match=named):
        load_method(method)(facts, parse_budget("llava", "retain-64"))
    facts = replace(facts, heads=dict.fromkeys(prune_layers(32), ()))
    with pytest.raises(BudgetError, match="no layer has a chosen head, so the method has no stage"):
        load_method(method)(facts, parse_budget("llava", "retain-64+no-sanitizer"))


def test_an_export_with_heads(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    file, output = tmp_path / "heads.json", tmp_path / "bundle"
    config = json.loads((checkpoint("gqa-112") / "config.json").read_text())["text_config"]
    write_heads(file, chosen_heads(config["num_hidden_layers"], config["num_attention_heads"]))
    export = ("sinkprune-export", checkpoint("gqa-112"), "-o", output, "--budgets", "retain-64", "--methods")
    said = "sinkprune-calibrate attention BUNDLE --data FILE.jsonl --heads heads.json"
    methods = ",".join(["sinkpruner", *WITH_HEADS])
    assert_refused(run(*export, methods), "'sinkpruner-heads' and 'sinkpruner-text-heads' need", said)
    refused = run(*export, "sinkpruner", "--heads", file)
    assert_refused(refused, "found --heads, which are for methods sinkpruner-heads and")
    assert_refused(run(*export, methods, "--heads", tmp_path / "none.json"), "none.json", said)
    assert not output.exists()
    outcome = run(*export, methods, "--heads", file)
    assert outcome.code == 0, outcome.stderr
    manifest = read_bundle(output).manifest
    by_layer = heads_by_layer(manifest.language_model.num_layers, manifest.language_model.num_heads)
    for method in WITH_HEADS:
        assert manifest.plans[method]["retain-64"].heads == {str(layer): own for layer, own in by_layer.items()}
    assert manifest.plans["sinkpruner"]["retain-64"].heads is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"heads_version": 2}, "have the version 2, this sinkprune reads 1"),
        ({"heads_version": None}, "no file of heads"),
        ({"more": 3}, "unknown field 'more'"),
    ],
)
def test_files_that_are_no_heads_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(json.dumps({**to_json(chosen_heads(8, 4)), **change}))
    with pytest.raises(UsageError, match=said):
        read_heads(tmp_path / "heads.json")


@pytest.mark.parametrize(
    ("layers", "chosen", "count", "said"),
    [
        ((2, 6, 15), (0,), 4, "are of layers 2, 6, 15 of 'small', and this decoder is pruned after layers 1"),
        ((1, 2, 4), (0,), 6, "a decoder with 6 heads, 'small', and this one has 4"),
        ((1, 2, 4), (0, 4), 4, "are 0, 4, expected ascending numbers from 0 to 3"),
    ],
)
def test_heads_of_another_decoder_are_refused(
    layers: tuple[int, ...], chosen: tuple[int, ...], count: int, said: str
) -> None:
    heads = ChosenHeads(1, "small", {str(layer): LayerHeads(chosen, (1.0,) * count) for layer in layers})
    with pytest.raises(UsageError, match=said):
        heads.of(replace(graphs.language_model(), num_layers=8))
