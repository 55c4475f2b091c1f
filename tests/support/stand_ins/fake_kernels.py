"""A stand-in for the plugins' kernels: numpy on the memory and the stream of a fake device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError
from sinkprune.engines.plugins.launches import Launch
from support.references import reference
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_tensorrt import array_at


class FakeKernels:
    """A `KernelRunner` whose launches are enqueued on a fake device."""

    def __init__(self, device: FakeDevice, missing: str = "") -> None:
        """Ship no kernels if a reason is given why they are `missing`."""
        self._device, self._missing = device, missing
        self.prepared = set[tuple[str, str]]()

    def prepare(self, launches: Sequence[Launch]) -> None:
        if self._missing:
            raise BackendError(self._missing)
        assert not self._device.capturing
        self.prepared |= {(launch.kernel, launch.dtype) for launch in launches}

    def run(self, launches: Sequence[Launch], stream: int) -> None:
        assert stream == self._device.stream
        for launch in launches:
            assert (launch.kernel, launch.dtype) in self.prepared, "a capture would load a kernel"
            self._device.calls.append(launch.kernel)
            self._device.enqueue(lambda launch=launch: _compute(launch))  # type: ignore[misc]


def _compute(launch: Launch) -> None:
    compute = _top_rho if launch.kernel == "top_rho" else _diversity
    compute(launch.grid[1], launch.dtype, *(int(value) for value in launch.arguments))


def _top_rho(
    groups: int, dtype: str, norms: int, tokens: int, n: int, width: int, count: int, sink: int, outlier: int
) -> None:
    every, rows = _at(norms, (groups, n), "float32"), _at(tokens, (groups, n, width), dtype)
    for group in range(groups):
        top = np.argsort(-every[group], kind="stable")[:count]
        _at(sink, (groups, 1, width), dtype)[group, 0] = rows[group, top].astype(np.float32).mean(axis=0)
        mask = _at(outlier, (groups, n), "int32")[group]
        mask[:] = 0
        mask[top] = 1


def _diversity(groups: int, dtype: str, *values: int) -> None:
    tokens, candidate, reserved, n, width, reserves, count, batch, _first, last, chosen, _scratch = values
    # Only the last phase gives something.
    if last < 2 + -(-count // batch):
        return
    rows = _at(tokens, (groups, n, width), dtype).astype(np.float64)
    masks, kept = _at(candidate, (groups, n), "int32"), _at(reserved, (groups, reserves), "int64")
    for group in range(groups):
        allowed = np.flatnonzero(masks[group]).tolist()
        found = reference.diversity(rows[group], allowed, kept[group].tolist(), count, count // batch)
        _at(chosen, (groups, count), "int64")[group] = sorted(found)


def _at(address: int, shape: tuple[int, ...], dtype: str) -> Any:
    return array_at(address, shape, np.dtype(dtype))
