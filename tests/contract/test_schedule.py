"""Schedules equal dropping rows layer by layer; FLOPs are those of method.md section 5, digit by digit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.budgets import FAMILIES, Counts, one_stage, prune_layers
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.flops import decode_bytes, layer_flops, prefill_flops
from sinkprune.contract.manifest import LanguageModel, Manifest
from sinkprune.contract.precision import WeightsName
from sinkprune.contract.schedule import PictureSchedule, VisualLayout, schedule
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families import load_family
from support.references.steps import layout_of


def layout(groups: int, tokens: int, unpruned: int | None = None) -> VisualLayout:
    """Return a layout with numbers of tokens only."""
    rows = np.arange(groups * tokens if unpruned is None else unpruned)
    return VisualLayout((1, 1), groups, tokens, rows, np.zeros((groups * tokens, 4)), (range(tokens),), None, 0, 0, 0)


def rows_by_hand(counts: Counts, groups: int, cuts: list[int], layers: int) -> list[int]:
    """Return the visual rows of each layer and of the head, dropped one by one down to each stage's count."""
    rows = [object() for _ in range(groups * counts.kept)]
    given = []
    for layer in range(layers + 1):
        given.append(len(rows))
        if layer in cuts:
            while len(rows) > counts.stages[cuts.index(layer)]:
                rows.pop()
    return given


counts = st.builds(
    Counts,
    outliers=st.integers(0, 5),
    sink=st.integers(0, 1),
    reserve=st.integers(0, 30),
    diverse=st.integers(0, 30),
    stages=st.lists(st.integers(0, 90), max_size=4).map(tuple),
)


@given(counts, st.integers(1, 5), st.data())
def test_what_reaches_each_layer_is_what_is_left_by_hand(counts: Counts, groups: int, data: st.DataObject) -> None:
    layers, stages = 12, len(counts.stages)
    cuts = sorted(data.draw(st.sets(st.integers(0, layers - 2), min_size=stages, max_size=stages)))
    expected = rows_by_hand(counts, groups, cuts, layers)
    found = PictureSchedule.of(counts, groups, cuts)
    assert [found.reaching(layer) for layer in range(layers + 1)] == expected
    assert found.after == {cut: expected[cut + 1] for cut in cuts}
    assert found.mean(layers) == Fraction(sum(expected[:layers]), layers)


@pytest.fixture
def qwen(bundle: Callable[..., Path]) -> Manifest:
    return read_bundle(bundle("qwen", "fp32", ("prune-80", "prune-80+per-frame"), max_frames=8)).manifest


def test_shares_are_of_what_the_picture_has(qwen: Manifest) -> None:
    layers = qwen.language_model.num_layers
    budget = one_stage(FAMILIES["qwen2.5-vl"].budgets["prune-80"], 10_000, layers)
    picture = schedule(qwen, "sinkpruner", "prune-80", [layout(4, 30)]).pictures[0]
    assert (picture.groups, picture.counts) == (1, budget.resolve(120))
    two = schedule(qwen, "sinkpruner", "prune-80", [layout(4, 30), layout(1, 30)])
    assert two.pictures[0] == picture
    assert two.rows == picture.rows + two.pictures[1].rows
    cut, *_ = prune_layers(layers)
    assert two.kept == {cut: [one.after[cut] for one in two.pictures]}
    apart = schedule(qwen, "sinkpruner", "prune-80+per-frame", [layout(4, 30)]).pictures[0]
    assert (apart.groups, apart.counts) == (4, budget.resolve(30, 4))
    assert apart.rows == 4 * budget.resolve(30).kept
    assert [*apart.after.values()] == [min(apart.rows, stage.of(120)) for stage in budget.stages]


TEXT_TOKENS = 60
TABLE = {
    "none": (576, "8.450", "1.00", "8.840", "1.00"),
    "retain-128": (135.4, "2.553", "3.31", None, "3.02"),
    "retain-64": (67.7, "1.662", "5.08", None, "4.35"),
    "retain-32": (34.0, "1.222", "6.92", None, "5.56"),
}
"""Mean visual tokens, prefill TFLOP and speed-up, TFLOP with the vision tower (where printed) and speed-up."""


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    """A bundle's manifest with the shapes of LLaVA-1.5-7B."""
    family = read_family("llava-1.5-7b", PRESETS["llava-1.5-7b"])
    small = read_bundle(bundle("mha-336")).manifest
    return dataclasses.replace(small, language_model=family.language_model, vision=family.vision)


def test_the_table_of_llava_7b(manifest: Manifest) -> None:
    model, layout = manifest.language_model, layout_of(load_family(manifest), (336, 336))
    assert f"{layout.tower_flops / 1e12:.3f} {576 * layout.projector_flops / 1e12:.3f}" == "0.366 0.024"
    counts = dict[str, tuple[int, int]]()
    for budget, (tokens, prefill, speedup, with_tower, speedup_with_tower) in TABLE.items():
        sent, visual = 576, [576] * 32
        if budget != "none":
            # method.md section 2: the stages follow layers 2, 6 and 15.
            resolved = FAMILIES["llava"].budgets[budget].resolve(576)
            sent, (first, second, third) = resolved.kept, resolved.stages
            visual = [sent] * 3 + [first] * 4 + [second] * 9 + [third] * 16
        decoder = prefill_flops(model, [TEXT_TOKENS + layer for layer in visual])
        whole = decoder + layout.tower_flops + layout.projector_flops * sent
        counts[budget] = decoder, whole
        assert mean(visual) == pytest.approx(tokens, abs=0.05)
        assert f"{decoder / 1e12:.3f}" == prefill
        assert with_tower in (None, f"{whole / 1e12:.3f}")
        unpruned = counts["none"]
        assert (f"{unpruned[0] / decoder:.2f}", f"{unpruned[1] / whole:.2f}") == (speedup, speedup_with_tower)


@pytest.mark.parametrize(("weights", "bits"), [("bf16", 16), ("int4", 4)])
def test_decoding_reads_every_weight_once_and_the_cache(
    weights: WeightsName, bits: int, bundle: Callable[..., Path]
) -> None:
    manifest = read_bundle(bundle("mha-336", weights=weights)).manifest
    lm = manifest.language_model
    matrices = lm.num_layers * (4 * 64 * 64 + 3 * 64 * 160) + 64 * lm.vocab_size
    # Norms and scales beside them, and up to a page in front of each of some forty tensors.
    assert 0 < decode_bytes(manifest, 0) - matrices * bits // 8 < 200_000
    assert decode_bytes(manifest, 1000) == decode_bytes(manifest, 0) + 1000


@pytest.mark.parametrize("head", [2, 8])
def test_a_layer_counts_every_matmul_and_grouped_heads_once(head: int) -> None:
    model = LanguageModel(8, 24, 2, 4, 2, head, 32, 64, 1e4)
    n, d, q, kv, m = 5, 8, 4 * head, 2 * head, 24
    matmuls = [(n, d, q), (n, d, kv), (n, d, kv), (n, q, d), (n, d, m), (n, d, m), (n, m, d)]
    attention = 2 * 4 * (2 * n * head * n)
    assert layer_flops(model, n) == sum(2 * a * b * c for a, b, c in matmuls) + attention
    assert prefill_flops(model, [n, n + 1]) == layer_flops(model, n) + layer_flops(model, n + 1)
