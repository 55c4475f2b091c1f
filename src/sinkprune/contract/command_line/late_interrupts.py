"""A line on stderr where Ctrl-C cannot end a command at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in order: Ctrl-C, the end of a service or a container, and that of a terminal."""
SECONDS = 2.0
_LINE = "interrupting: the step that runs now ends first\n"


@contextmanager
def late_interrupts_noted() -> Iterator[None]:
    """Print a line if one of `INTERRUPTS` has not ended the block after `SECONDS`.

    Python handles signals in the main thread, between its own steps: a library's call, such as a run of a graph,
    ends first. But it writes the number of each signal to a pipe at once, and a thread reads that. Only the main
    thread may enter the block.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] in INTERRUPTS:
                if not ended.wait(SECONDS):
                    with suppress(OSError):
                        sys.stderr.write(_LINE)
                return

    thread = threading.Thread(target=watch, name="sinkprune interrupts", daemon=True)
    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(earlier)
        # The thread ends by a byte. Closing alone would not do where a forked process has the pipe too.
        with suppress(BlockingIOError):
            os.write(writer, bytes([signal.SIGINT]))
        thread.join()
        os.close(writer)
        os.close(reader)
