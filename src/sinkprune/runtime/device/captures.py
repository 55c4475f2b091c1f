"""Calls of engines at fixed addresses, captured as CUDA graphs and replayed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

from sinkprune.contract.errors import BackendError
from sinkprune.contract.report import CaptureReport
from sinkprune.runtime.device.cuda import Device

MOST_BYTES = 512 << 20
"""The device memory that captured graphs may take. The least recently used go first."""
LEAST_BYTES = 1 << 20
"""What a graph counts at least, because the driver allocates in larger pieces than a graph."""
_REMEMBERED = 4096
"""Calls that ran once, and may come again."""

Replay = Callable[[], None]


class Capture(NamedTuple):
    """A captured graph, whose memory is freed with the last reference to it."""

    replay: Replay
    """Enqueues the same work at the same addresses."""
    held: object = None
    """What the graph needs for as long as it may be replayed."""
    release: Callable[[], None] = lambda: None
    """Frees what the last reference does not."""


class Captures:
    """Runs a call at its first use, captures it at its second, and replays it from then on.

    A key holds the graph, every shape and every address that the call depends on, so a replay does what the call
    would do. A graph that cannot be captured runs as it is, and `report` gives the reason.
    """

    def __init__(self, device: Device, most_bytes: int = MOST_BYTES) -> None:
        """Capture work on the stream of `device`, if it has graphs."""
        self._device, self._most = device, most_bytes
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._held: OrderedDict[Hashable, tuple[str, Capture, int]] = OrderedDict()
        self._bytes = 0
        self._captured, self._replayed, self._released = Counter[str](), Counter[str](), Counter[str]()
        self._refused, self._without_kernels = dict[str, str](), dict[str, str]()

    def run(self, graph: str, key: Hashable, enqueue: Callable[[], None], capture: Callable[[], Capture]) -> None:
        """Run `enqueue`, a call of the engine named `graph`, or replay it.

        `capture` does the same work and captures it. Raises what `enqueue` raises.
        """
        key = (graph, key)
        if key in self._held:
            self._held.move_to_end(key)
            self._held[key][1].replay()
            self._replayed[graph] += 1
        elif key not in self._seen:
            enqueue()
            self._remember(key)
        elif not self._capture(graph, key, capture):
            enqueue()

    def note(self, graph: str, key: Hashable) -> None:
        """Count a call that ran without `run` as the first use of its key."""
        self._remember((graph, key))

    def refuse(self, graph: str, reason: str) -> None:
        """Never capture the graph of this name, for this reason."""
        self._refused[graph] = reason

    def note_missing(self, graph: str, reason: str) -> None:
        """Report that the graph of this name runs without kernels of our own, for this reason."""
        self._without_kernels[graph] = reason

    def report(self) -> CaptureReport:
        """Return what is captured, for reports."""
        counts = {"captured": self._captured, "replayed": self._replayed, "released": self._released}
        return CaptureReport(
            bytes=self._bytes,
            most_bytes=self._most if self._device.has_graphs else 0,
            graphs={
                name: {what: counter[name] for what, counter in counts.items()} for name in sorted(self._captured)
            },
            not_captured=dict(sorted(self._refused.items())),
            without_kernels=dict(sorted(self._without_kernels.items())),
        )

    def _remember(self, key: Hashable) -> None:
        if self._device.has_graphs:
            self._seen[key] = None
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)

    def _capture(self, graph: str, key: Hashable, capture: Callable[[], Capture]) -> bool:
        """Return whether the call ran and is captured."""
        if graph in self._refused:
            return False
        free, _ = self._device.memory()
        try:
            made = capture()
        except BackendError as error:
            self._refused[graph] = str(error)
            return False
        size = max(LEAST_BYTES, free - self._device.memory()[0])
        del self._seen[key]
        self._held[key] = graph, made, size
        self._bytes += size
        self._captured[graph] += 1
        while self._bytes > self._most:
            _, (name, oldest, freed) = self._held.popitem(last=False)
            oldest.release()
            self._bytes -= freed
            self._released[name] += 1
        return True


def captured_on_stream(device: Device, enqueue: Callable[[], None]) -> Capture:
    """Run `enqueue`, then capture it on the device's stream."""
    # A library updates its state in the first call with new shapes, which must not be captured.
    enqueue()
    device.begin_capture()
    try:
        enqueue()
    finally:
        # Also after an error, a stream must not stay in capture.
        graph = device.end_capture()
    return Capture(lambda: device.replay(graph))
