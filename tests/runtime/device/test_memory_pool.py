"""The memory pool returns the same addresses for the same allocations, and takes no more memory than needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from sinkprune.contract.errors import BackendError
from sinkprune.runtime.device.cuda import Block, MemoryPool, size_class
from support.stand_ins.fake_device import FakeDevice

Frame = Callable[[MemoryPool], list[int]]


class DownwardsDevice(FakeDevice):
    """A device whose addresses descend, as those of a driver may."""

    def __init__(self) -> None:
        super().__init__()
        self._next = itertools.count(1 << 40, -(1 << 20))

    def allocate(self, size: int) -> int:
        super().allocate(size)
        return next(self._next)


def frame(seed: int) -> Frame:
    """Allocations of all sizes, freed in another order."""

    def run(pool: MemoryPool) -> list[int]:
        generator = np.random.default_rng(seed)
        held: list[Block] = []
        addresses = []
        for _ in range(200):
            if held and generator.random() < 0.4:
                held.pop(generator.integers(len(held)))
            held.append(pool.allocate(int(generator.integers(0, 40_000))))
            addresses.append(held[-1].address)
        return addresses

    return run


def test_the_same_requests_get_the_same_addresses_from_the_first_time_on() -> None:
    pool = MemoryPool(DownwardsDevice())
    first = {seed: frame(seed)(pool) for seed in (1, 2, 3)}
    for seed in (3, 1, 2, 1):
        assert frame(seed)(pool) == first[seed]


def test_blocks_that_are_held_do_not_overlap() -> None:
    pool, sizes = MemoryPool(FakeDevice()), [0, 1, 1000, 1024, 1025, 1536, 1537, 5000, 5000, 1 << 20]
    blocks = sorted((pool.allocate(size) for size in sizes), key=lambda block: block.address)
    ends = [block.address + block.size for block in blocks]
    assert all(end <= block.address for end, block in zip(ends, blocks[1:], strict=False))


def test_a_block_comes_back_with_its_last_reference() -> None:
    device = FakeDevice()
    pool = MemoryPool(device)
    block = pool.allocate(2000)
    other, address = block, block.address
    del block
    assert pool.allocate(2000).address != address
    del other
    assert pool.allocate(2000).address == address
    assert device.calls.count("allocate") == 2


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 1536, 1537, 2048, 2049, 10**6, 10**9])
def test_size_classes_hold_the_size_and_little_more(size: int) -> None:
    held = size_class(size)
    assert size <= held <= max(1024, size * 1.5)
    assert held % 256 == 0
    assert size_class(held) == held


def test_free_blocks_make_room_before_memory_is_out() -> None:
    device = FakeDevice(total=10_000)
    pool = MemoryPool(device)
    kept, small = pool.allocate(1000), pool.allocate(4000)
    del small
    large = pool.allocate(8000)
    assert device.memory()[0] == 10_000 - kept.size - large.size
    assert device.calls[-4:] == ["allocate", "synchronize", "free", "allocate"]


def test_out_of_memory_names_need_and_free() -> None:
    pool = MemoryPool(FakeDevice(total=10_000))
    block = pool.allocate(8000)
    with pytest.raises(BackendError, match="4096 bytes are needed, 1808 of 10000 are free"):
        pool.allocate(4000)
    assert block.address
