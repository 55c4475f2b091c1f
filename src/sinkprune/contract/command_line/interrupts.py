"""Ctrl-C, and the other signals that end a command in order, as `KeyboardInterrupt`."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in order: Ctrl-C, the end of a service or a container, and that of a terminal."""
_CLEAN_UP_S = 3.0
"""How long a clean-up may take before another Ctrl-C stops it."""


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on all `INTERRUPTS`, so that half-written files are removed and results kept.

    An interrupt that a library turns into another error stays an interrupt. One that Python drops, as in `__del__`,
    is repeated.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    present = signal.getsignal(signal.SIGTERM)
    # `start` runs a command within its own block.
    handler = present if isinstance(present, _Interrupts) else _Interrupts()

    def on_dropped(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            handler.interrupted_at = None
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            hook(dropped)

    # Background jobs of a shell ignore Ctrl-C, and those of nohup the end of the terminal.
    numbers = [
        number for number in INTERRUPTS if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
    hook, sys.unraisablehook = sys.unraisablehook, on_dropped
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    except Exception as error:
        if handler.interrupted_at is not None:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = hook
        for number, former in earlier.items():
            signal.signal(number, former)


class _Interrupts:
    """Raises KeyboardInterrupt at each of `INTERRUPTS`, and ignores those that follow within `_CLEAN_UP_S`."""

    def __init__(self) -> None:
        self.interrupted_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        # A second Ctrl-C would stop the clean-up of the first. Later ones stop what still runs.
        if self.interrupted_at is not None and now - self.interrupted_at < _CLEAN_UP_S:
            return
        self.interrupted_at = now
        raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Drop what is printed from now on to a terminal that has ended: there, each write would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)
