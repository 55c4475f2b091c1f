"""Calls that repeat: run, captured, replayed, forgotten."""

from __future__ import annotations

import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.tensorrt.engine import CudaGraphs
from support.stand_ins.fake_device import FakeDevice


def test_graphs_are_captured_second_replayed_third_and_the_oldest_goes_first() -> None:
    device, ran = FakeDevice(), []
    graphs = CudaGraphs(device, most=2)

    def call(key: str) -> list[str]:
        device.calls.clear()
        graphs.run(key, lambda: device.enqueue(lambda: ran.append(key)))
        device.synchronize()
        return [name for name in device.calls if name != "synchronize"]

    capture, replay = ["begin_capture", "end_capture"], ["replay"]
    assert [call("a"), call("b"), call("a"), call("b")] == [[], [], capture, capture]
    assert [call("a"), call("b"), call("a")] == [replay, replay, replay]
    assert call("c") == []
    assert call("a") == []
    assert call("c") == capture
    assert ran == list("abababacac")


def test_a_capture_that_fails_is_ended() -> None:
    device = FakeDevice()
    graphs = CudaGraphs(device)
    graphs.run("key", lambda: None)
    attempts = iter([None])

    def enqueue() -> None:
        if next(attempts, "none left") == "none left":
            raise BackendError("refused")

    with pytest.raises(BackendError, match="refused"):
        graphs.run("key", enqueue)
    assert not device.capturing
