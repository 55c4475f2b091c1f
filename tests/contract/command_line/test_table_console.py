"""Notes of commands that measure."""

from __future__ import annotations

from sinkprune.contract.command_line.table_console import noise_note
from sinkprune.contract.report import Spread


def test_an_order_within_the_spread_is_doubted() -> None:
    quick, close, slow = Spread(10.0, 12.0), Spread(11.0, 11.5), Spread(20.0, 21.0)
    note = noise_note("TTFT", 5, {"none": slow, "a": close, "b": quick})
    assert note.startswith("warning: TTFT differs by up to 20 % from run to run") and "quicker: b or a;" in note
    assert "warning" not in noise_note("TTFT", 5, {"none": slow, "a": close})
    assert "one round" in noise_note("TTFT", 1, {"none": slow, "a": close})
