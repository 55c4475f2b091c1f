"""The process's peak of resident memory during a block, on Linux."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from sinkprune.runtime.steps.observer import Observer

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# "5" resets the peak (VmHWM), proc(5)
_RESET_PEAK = "5"


class PeakMemory:
    """The largest peak of all watched blocks. `bytes` is None if the system does not report it."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Include the peak of the block."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            # Without the reset, the peak may be that of an earlier block.
            yield
            return
        yield
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found:
            self.bytes = max(self.bytes or 0, int(found.group(1)) * 1024)


class PeaksOfStages(Observer):
    """The peak of resident memory of a request, and of each of its stages while `watching` is True."""

    STAGES = ("vision", "sanitizer", "projector", "prefill", "decode")

    def __init__(self) -> None:
        self.watching = False
        self.whole = PeakMemory()
        """The peak of whole requests."""
        self._peaks = {stage: PeakMemory() for stage in self.STAGES}

    def during(self, part: str) -> AbstractContextManager[Any]:
        return self._peaks[part].watch() if self.watching and part in self._peaks else nullcontext()

    @property
    def bytes(self) -> dict[str, int]:
        """By the stage's name, for stages that ran; empty if the system does not report it."""
        return {stage: peak.bytes for stage, peak in self._peaks.items() if peak.bytes is not None}
