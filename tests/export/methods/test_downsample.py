"""The blocks of a fixed grid that `downsample` averages, and the share of a picture that takes a budget's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.flops import layer_flops
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export.dialects import opset24
from sinkprune.export.methods.downsample import build, build_for_ttft, grid_blocks
from sinkprune.export.pruning.plan import PlanFacts, VariableTokens
from sinkprune.export.weights import PRECISIONS
from support.models.graphs import language_model


@given(side=st.integers(1, 40), data=st.data())
def test_blocks_divide_the_grid(side: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, side**2))
    blocks = grid_blocks(side**2, count)
    assert len(blocks) == count and all(blocks)
    assert sorted(chain(*blocks)) == [*range(side**2)]
    # Rectangles, none of which is more than a row and a column larger than another.
    heights = [len({token // side for token in block}) for block in blocks]
    widths = [len({token % side for token in block}) for block in blocks]
    assert [height * width for height, width in zip(heights, widths, strict=True)] == [*map(len, blocks)]
    assert max(heights) - min(heights) <= 1
    assert max(widths) - min(widths) <= 1 + side // max(1, round(count**0.5))
    firsts = [(block[0] // side, block[0] % side) for block in blocks]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(("tokens", "count"), [(576, 576), (7, 3), (1, 1)])
def test_all_tokens_and_grids_of_one_line(tokens: int, count: int) -> None:
    blocks = grid_blocks(tokens, count)
    assert [*chain(*blocks)] == [*range(tokens)] and len(blocks) == count


@given(
    most=st.integers(20, 3000),
    linear=st.integers(0, 10**9),
    square=st.integers(0, 10**6),
    name=st.sampled_from(sorted(FAMILIES["qwen3-vl"].budgets)),
)
def test_a_share_takes_the_flops_of_the_budget_and_a_token_more_takes_more(
    most: int, linear: int, square: int, name: str
) -> None:
    lm, budget = replace(language_model(), num_layers=28), FAMILIES["qwen3-vl"].budgets[name]

    def tower(tokens: int) -> int:
        return linear * tokens + square * tokens**2

    def decoder(visual: Sequence[int]) -> int:
        return sum(layer_flops(lm, count + 64) for count in visual)

    # Qwen's stages are those of 28 layers.
    schedule = PictureSchedule.of(budget.resolve(most), 1, (2, 6, 15))
    visual = [*map(schedule.reaching, range(28))]
    wanted = tower(most) + decoder(visual)
    facts = PlanFacts(lm, VariableTokens(most, 784, most, tower), 8, PRECISIONS["fp32"], opset24)
    plan = build_for_ttft(facts, budget)
    assert plan.sanitizer is None and not plan.select_after
    tokens = plan.kept.reserve.of(most)
    assert 1 <= tokens < most
    if tokens > 1:
        assert tower(tokens) + decoder([tokens] * 28) <= wanted
    more = tokens + 1
    assert tower(more) + decoder([more] * 28) > wanted


def test_towers_of_one_resolution_and_unknown_towers() -> None:
    budget = FAMILIES["llava"].budgets["retain-64"]
    facts = PlanFacts(language_model(), 64, 8, PRECISIONS["fp32"], opset24)
    assert build_for_ttft(facts, budget).kept == build(facts, budget).kept
    unknown = replace(facts, tokens=VariableTokens(64, 784, 64))
    with pytest.raises(ValueError, match="FLOPs of the vision tower are not known"):
        build_for_ttft(unknown, FAMILIES["qwen3-vl"].budgets["prune-66.7"])
