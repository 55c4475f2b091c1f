"""Calls that repeat are run, captured, replayed and forgotten, because the memory pool returns the same addresses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.backends.device_memory import DeviceMemory
from sinkprune.runtime.device.captures import LEAST_BYTES, Captures, captured_on_stream
from sinkprune.runtime.device.cuda import Block, MemoryPool, size_class
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

    def fails_always() -> None:
        raise BackendError("no memory")

    with pytest.raises(BackendError, match="no memory"):
        captures.run("head", "other", fails_always, lambda: captured_on_stream(device, fails_always))


class DownwardsDevice(FakeDevice):
    """A device whose addresses descend, as those of a driver may."""

    def __init__(self) -> None:
        super().__init__()
        self._next = itertools.count(1 << 40, -(1 << 20))

    def allocate(self, size: int) -> int:
        super().allocate(size)
        return next(self._next)


def addresses(pool: MemoryPool, seed: int) -> list[int]:
    """Of blocks of all sizes, which are freed in another order."""
    generator, held, found = np.random.default_rng(seed), list[Block](), list[int]()
    for _ in range(200):
        if held and generator.random() < 0.4:
            held.pop(generator.integers(len(held)))
        held.append(pool.allocate(int(generator.integers(0, 40_000))))
        found.append(held[-1].address)
    return found


def test_the_same_requests_get_the_same_addresses_from_the_first_time_on() -> None:
    pool = MemoryPool(DownwardsDevice())
    first = {seed: addresses(pool, seed) for seed in (1, 2, 3)}
    for seed in (3, 1, 2, 1):
        assert addresses(pool, seed) == first[seed]


def test_blocks_that_are_held_do_not_overlap_and_are_little_larger_than_asked_for() -> None:
    pool, sizes = MemoryPool(FakeDevice()), [0, 1, 1023, 1024, 1025, 1536, 1537, 2048, 2049, 5000, 5000, 1 << 20]
    blocks = [pool.allocate(size) for size in sizes]
    for size, block in zip(sizes, blocks, strict=True):
        assert size <= block.size <= max(1024, size * 1.5)
        assert block.size % 256 == 0
        assert size_class(block.size) == block.size
    for before, after in itertools.pairwise(sorted(blocks, key=lambda block: block.address)):
        assert before.address + before.size <= after.address


def test_free_blocks_make_room_before_memory_is_out() -> None:
    device = FakeDevice(total=10_000)
    pool = MemoryPool(device)
    kept, small = pool.allocate(1000), pool.allocate(4000)
    del small
    large = pool.allocate(8000)
    assert device.memory()[0] == 10_000 - kept.size - large.size
    assert device.calls[-4:] == ["allocate", "synchronize", "free", "allocate"]
