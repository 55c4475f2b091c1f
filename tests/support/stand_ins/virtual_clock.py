"""A clock that stands still while any of its threads runs, and jumps to the next time that one waits for."""

from __future__ import annotations

import threading

_LOOK_S = 0.005
"""How often, in real seconds, a waiting thread looks for threads that ended."""


class VirtualClock:
    """The clock of a `PolicyLoop`. The thread that makes it counts, and each that starts later, until it ends.

    A thread counts before its first call too: the system may let it run late, and the clock must not go on without
    it.
    """

    def __init__(self) -> None:
        self._now, self._changed = 100.0, threading.Condition()
        self._waits: dict[int, float] = {}
        self._others = {*threading.enumerate()} - {threading.current_thread()}

    def now(self) -> float:
        with self._changed:
            return self._now

    def wait(self, until: float) -> None:
        own = threading.get_ident()
        with self._changed:
            if until <= self._now:
                return
            self._waits[own] = until
            while own in self._waits:
                alive = {thread.ident for thread in threading.enumerate() if thread not in self._others}
                if alive <= self._waits.keys():
                    self._now = min(self._waits[thread] for thread in alive if thread is not None)
                    # They run from now on, also before the system lets them.
                    self._waits = {thread: end for thread, end in self._waits.items() if end > self._now}
                    self._changed.notify_all()
                else:
                    self._changed.wait(_LOOK_S)
