"""Calls that repeat: run, captured, replayed, forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.device_memory import DeviceMemory
from sinkprune.runtime.device.captures import LEAST_BYTES, Capture, Captures, captured_on_stream
from sinkprune.runtime.device.cuda import size_class
from support.stand_ins.fake_device import FakeDevice


class Calls:
    """Calls on a fake device, and what ran."""

    def __init__(self, most: int = 2, **options: Any) -> None:
        self.device, self.ran = FakeDevice(**options), list[str]()
        self.captures = Captures(self.device, most * LEAST_BYTES)

    def __call__(self, key: str, graph: str = "head") -> list[str]:
        """Return what the device was asked to do."""

        def enqueue() -> None:
            self.device.enqueue(lambda: self.ran.append(key))

        self.device.calls.clear()
        self.captures.run(graph, key, enqueue, lambda: captured_on_stream(self.device, enqueue))
        self.device.synchronize()
        return [name for name in self.device.calls if name not in ("synchronize", "memory")]


CAPTURE, REPLAY = ["begin_capture", "end_capture"], ["replay"]


def test_calls_are_captured_second_replayed_third_and_the_least_recently_used_goes_first() -> None:
    call = Calls()
    assert [call("a"), call("b"), call("a"), call("b")] == [[], [], CAPTURE, CAPTURE]
    assert [call("b"), call("a")] == [REPLAY, REPLAY]
    # `b` was replayed before `a`.
    assert [call("c"), call("c"), call("a"), call("b")] == [[], CAPTURE, REPLAY, []]
    assert call.ran == list("ababbaccab")
    report = call.captures.report()
    assert report.bytes == report.most_bytes == 2 * LEAST_BYTES
    assert report.graphs == {"head": {"captured": 3, "replayed": 3, "released": 1}}


def test_memory_stays_bounded_over_many_requests_of_random_shapes() -> None:
    call, random = Calls(5), np.random.default_rng(0)
    memory = DeviceMemory(call.device, call.captures)
    rows = random.zipf(1.3, 10_000) % 500
    # A request holds two tensors, so the device holds two blocks of each size at most.
    most = 2 * sum({size_class(int(count) * 256) for count in rows})
    for count in rows.tolist():
        given, made = (memory.empty((count, 64), np.dtype(np.float32)) for _ in range(2))
        call(f"{count}: {given.address} to {made.address}")
        free, total = call.device.memory()
        assert call.captures.report().bytes <= 5 * LEAST_BYTES and total - free <= most
        # The next request takes the same blocks, in the same order.
        del given, made
    # Each call ran once, in order, whether it was run, captured or replayed.
    assert [int(key.partition(":")[0]) for key in call.ran] == rows.tolist()
    counts = call.captures.report().graphs["head"]
    assert counts["replayed"] > 1000 and counts["captured"] - counts["released"] == 5


def test_a_graph_that_frees_memory_later_is_told_to() -> None:
    device, released = FakeDevice(), list[str]()
    captures = Captures(device, most_bytes=LEAST_BYTES)
    for key in "aabb":
        captures.run(
            "head", key, lambda: None, lambda key=key: Capture(lambda: None, None, lambda: released.append(key))
        )
    assert released == ["a"]


def test_a_capture_that_fails_is_ended_and_reported_and_the_graph_runs_as_it_is() -> None:
    device, ran = FakeDevice(), list[str]()
    captures = Captures(device)

    def fails() -> None:
        if device.capturing:
            raise BackendError("no such kernel")
        ran.append("run")

    for _ in range(3):
        captures.run("head", "key", fails, lambda: captured_on_stream(device, fails))
    assert not device.capturing
    assert captures.report().not_captured == {"head": "no such kernel"}
    # The second time also before the capture.
    assert len(ran) == 4


def test_an_error_of_the_call_itself_is_raised() -> None:
    captures = Captures(FakeDevice())

    def fails() -> None:
        raise BackendError("no memory")

    with pytest.raises(BackendError, match="no memory"):
        captures.run("head", "key", fails, lambda: captured_on_stream(FakeDevice(), fails))


def test_without_graphs_calls_run_and_nothing_is_remembered() -> None:
    call = Calls(has_graphs=False)
    assert [call("a") for _ in range(3)] == [[], [], []]
    assert call.captures.report().most_bytes == 0
