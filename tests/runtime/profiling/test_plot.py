"""The bars of a profile's picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sinkprune.runtime.profiling.plot import _PARTS, _widths


def budget(**medians: float) -> Any:
    """Return what the plot reads of a budget's report."""
    parts = dict.fromkeys((*_PARTS, "per_token", "latency"))
    return SimpleNamespace(ms={**parts, **{name: SimpleNamespace(median=value) for name, value in medians.items()}})


def test_bars_end_at_the_median_of_the_whole() -> None:
    # On a busy machine the medians of parts add up to less: 12 here.
    busy = budget(preprocess=2, prefill=4, select=1, per_token=2, latency=18)
    assert _widths(busy, 4) == pytest.approx(
        {**dict.fromkeys(_PARTS, 0), "preprocess": 3, "prefill": 4.5, "select": 1.5, "decode": 9}
    )


def test_bars_without_a_whole_are_the_parts() -> None:
    assert _widths(budget(preprocess=2, prefill=4), 1)["prefill"] == 4
