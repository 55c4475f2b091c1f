"""The lines that `sinkprune-calibrate schedule` prints of its report, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.calibration.scheduling.propose import BudgetTarget, unreachable
from sinkprune.calibration.scheduling.report import Candidate, _described
from sinkprune.contract.budgets import parse_budget
from sinkprune.contract.bundle import read_bundle


@pytest.mark.parametrize(
    ("rows", "layers", "said"),
    [
        ((29, 16), (4,), "29 tokens into the LLM, 16 after layer 4; mean 20.0 a layer"),
        ((29, 16, 9), (4, 8), "29 tokens into the LLM, 16, 9 after layers 4, 8; mean 20.0 a layer"),
        ((29,), (), "29 tokens into the LLM; mean 20.0 a layer"),
    ],
)
def test_one_layer_is_no_layers(rows: tuple[int, ...], layers: tuple[int, ...], said: str) -> None:
    candidate = Candidate(parse_budget("llava", "retain-64"), layers, rows, 20.0, 0.5, None, 30.0)
    assert _described(candidate, 0).startswith(said)


@pytest.mark.parametrize(("name", "pictures"), [("gqa-112", ""), ("qwen", "give smaller pictures, ")])
def test_where_pruning_gains_little_the_error_is_a_whole_sentence(
    name: str, pictures: str, bundle: Callable[..., Path]
) -> None:
    manifest = read_bundle(bundle(name)).manifest
    error = unreachable(BudgetTarget(10.0, None), manifest, "ms", 100.0, 105.0, None, "")
    said = f"Run the model unpruned, {pictures}or export it with weights in int8 or int4."
    assert str(error).endswith(f"Pruning gains too little here. {said}")
