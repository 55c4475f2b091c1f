"""A lock on a folder that one process writes in: the system gives it back, however the process ended."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = "sinkprune.lock"
"""The name of the locked file in its folder."""


def open_lock(place: Path, flags: int = 0) -> int:
    """An open descriptor of the lock in the folder `place`, which is not held yet; raises `OSError`."""
    return os.open(place / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)


def hold(lock: int) -> bool:
    """Lock an open lock; False where another holds it or has removed it. Raises `OSError` where nobody can."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock).st_nlink > 0
