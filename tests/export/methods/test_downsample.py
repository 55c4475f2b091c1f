"""The blocks of a fixed grid that `downsample` averages."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkprune.export.methods.downsample import grid_blocks


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
