"""The process's largest resident memory while something ran, where Linux tells it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# "5" resets the peak (VmHWM), proc(5)
_RESET_PEAK = "5"


class PeakMemory:
    """The largest peak of all watched blocks; `bytes` is None if the system does not tell."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take the block's peak into account."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            # Without the reset the peak would be some other block's.
            yield
            return
        yield
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found:
            self.bytes = max(self.bytes or 0, int(found.group(1)) * 1024)
