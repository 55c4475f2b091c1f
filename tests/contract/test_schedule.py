"""Schedules equal dropping rows layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.budgets import FAMILIES, Counts, one_stage, prune_layers
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import PictureSchedule, VisualLayout, schedule


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
def llava(bundle: Callable[..., Path]) -> Manifest:
    return read_bundle(bundle("gqa-112")).manifest


@pytest.fixture
def qwen(bundle: Callable[..., Path]) -> Manifest:
    return read_bundle(bundle("qwen", "fp32", ("prune-80", "prune-80+per-frame"), max_frames=8)).manifest


def test_fixed_counts_are_those_of_each_group(llava: Manifest) -> None:
    # 64 tokens: 7 and 7 of them and the sink; the mean of 12, 8, 4 after the stage
    one, five = (schedule(llava, "sinkpruner", "retain-64", [layout(groups, 64)]).pictures[0] for groups in (1, 5))
    assert (one.rows, [*one.after.values()]) == (15, [7])
    assert (five.rows, [*five.after.values()]) == (75, [35])
    assert (five.groups, five.counts) == (5, one.counts and one.counts.of_groups(5))


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
