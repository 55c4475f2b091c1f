"""Captures repeated calls into CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from sinkprune.runtime.device import Device

_MOST = 4096


class CudaGraphs:
    """Runs a call eagerly the first time, captures it the second time and replays it from then on.

    The key holds every shape and every address the call depends on, so a replay does what the call would do.
    At most `most` keys are remembered; the oldest goes first.
    """

    def __init__(self, device: Device, most: int = _MOST) -> None:
        self._device, self._most = device, most
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()

    def run(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Run `enqueue`, or replay its graph, on the device's stream. The same `key` must mean the same work.

        Raises what `enqueue` and the device raise.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._device.replay(graph)
            return
        # TensorRT updates its state in the first call with new shapes, which must not be captured.
        enqueue()
        self._graphs[key] = self._capture(enqueue) if key in self._graphs else None
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def _capture(self, enqueue: Callable[[], None]) -> Any:
        self._device.begin_capture()
        try:
            enqueue()
        finally:
            # Also after an error, a stream must not stay in capture.
            graph = self._device.end_capture()
        return graph
