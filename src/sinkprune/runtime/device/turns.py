"""Turns of threads on a device."""

from __future__ import annotations

from collections import deque
from threading import Lock, get_ident


class Turns:
    """A reentrant lock for `with` blocks, first come, first served.

    `threading.RLock` is not fair. A thread that releases it and acquires it again may overtake waiting threads, so a
    long answer could block a short one.
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
            # Ctrl-C while the thread waited, or just when its turn came.
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
