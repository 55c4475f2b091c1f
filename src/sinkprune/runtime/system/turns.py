"""A lock that threads get in the order in which they asked for it."""

from __future__ import annotations

from collections import deque
from threading import Lock, get_ident


class Turns:
    """A reentrant lock for `with` blocks, first come, first served.

    `threading.RLock` may give a thread that lets go of it and asks again at once its next turn before threads that
    wait, so a long answer would hold up a short one.
    """

    def __init__(self) -> None:
        self._changes = Lock()
        self._waiting: deque[tuple[int, Lock]] = deque()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        thread = get_ident()
        with self._changes:
            if self._holder in (None, thread):
                self._holder = thread
                self._depth += 1
                return
            called = Lock()
            called.acquire()
            self._waiting.append((thread, called))
        try:
            called.acquire()
        except BaseException:
            # Ctrl-C while it waited, or in the very moment in which its turn came.
            with self._changes:
                if (thread, called) in self._waiting:
                    self._waiting.remove((thread, called))
                else:
                    self._pass_on()
            raise

    def __exit__(self, *raised: object) -> None:
        with self._changes:
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    def _pass_on(self) -> None:
        self._holder, self._depth = None, 0
        if self._waiting:
            self._holder, called = self._waiting.popleft()
            self._depth = 1
            called.release()
