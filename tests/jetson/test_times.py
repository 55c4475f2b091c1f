"""Ranges of times from bounds and measured shares, computed by hand."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from sinkprune.contract.precision import WeightsName
from sinkprune.jetson.times import COMPUTE, SHARES, TimeBounds, TimeRange, expected_times, rounded
from support.programs.repository import ROOT

BOUNDS = TimeBounds(encoder_flops_ms=9.0, prefill_flops_ms=90.0, prefill_weights_ms=40.0, token_ms=41.0)


def test_a_range_is_the_bound_over_the_shares() -> None:
    times = expected_times(BOUNDS, "int4", new_tokens=3)
    assert (times.ttft.bound, times.token.bound, times.answer.bound) == (99, 41, 99 + 2 * 41)
    assert times.ttft.least == pytest.approx(99 / 0.9)
    assert times.ttft.most == pytest.approx(99 / 0.45)
    assert times.token.least == pytest.approx(41 / 0.79)
    assert times.token.most == pytest.approx(41 / 0.41)
    assert times.answer.most == pytest.approx(99 / 0.45 + 2 * 41 / 0.41)


def test_a_prefill_may_wait_for_weights_at_one_end_only() -> None:
    """The larger of FLOPs and weights counts at each end by itself."""
    bounds = TimeBounds(0.0, prefill_flops_ms=40.0, prefill_weights_ms=39.0, token_ms=1.0)
    ttft = expected_times(bounds, "int4", new_tokens=1).ttft
    assert ttft.least == pytest.approx(39 / 0.79)
    assert ttft.most == pytest.approx(39 / 0.41)
    assert expected_times(bounds, "fp16", new_tokens=1).ttft.most == pytest.approx(40 / 0.45)


def test_every_form_has_a_share_with_a_source() -> None:
    assert set(SHARES) == {COMPUTE, *get_args(WeightsName)}
    for share in SHARES.values():
        assert 0 < share.least <= share.most < 1
        pages = re.findall(r"[\w./-]+\.md", share.measured)
        assert pages and all((ROOT / page).is_file() for page in pages)
        if "memory read" in share.measured:
            assert "% of a plain read" in (ROOT / pages[0]).read_text(encoding="utf-8")


def test_small_times_keep_two_digits() -> None:
    assert TimeRange(3.14, 4.4, 85.4).range == "4.4-85"
    assert TimeRange(3.14, 0, 0).rounded_bound == "3.1"
    assert rounded(0.0312) == "0.031"
