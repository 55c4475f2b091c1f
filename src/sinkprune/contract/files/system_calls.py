"""System calls for replacing a folder: fsync, flock, and renames that exchange two folders or replace nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

LOCK = "sinkprune.lock"
"""The name of the locked file in a folder that a process writes."""
# File systems write concurrent requests together: 60 files take 10 ms, and 200 ms one by one.
_SYNC_THREADS = 8
# A folder may be writable but not readable. Some file systems sync no folders.
_NO_FOLDER_SYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP)
# What the system reports, without a name, where a disk or a limit takes no more of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RenameMode(IntEnum):
    """What a rename does with its target: the flags of renameat2(2)."""

    NO_REPLACE = 1
    """An existing target raises `FileExistsError`."""
    EXCHANGE = 2
    """Source and target change places."""


Rename = Callable[[Path, Path, RenameMode], None]
"""Renames its first path to its second. Raises `OSError`, with a number of `UNSUPPORTED` before anything changes."""
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""The error numbers of a system or file system without such a rename, for example NFS."""
_CURRENT_FOLDER = -100


@contextmanager
def naming_full(place: Path) -> Iterator[None]:
    """Name `place` in an error of the block that a disk or a limit takes no more."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            error.filename = error.filename or str(place)
        raise


def system_rename(source: Path, target: Path, how: RenameMode) -> None:
    """Rename `source` to `target` in one step. Raises `OSError`."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    failed = call is None or call(_CURRENT_FOLDER, os.fsencode(source), _CURRENT_FOLDER, os.fsencode(target), how)
    if failed:
        number = errno.ENOSYS if call is None else ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def move(source: Path, target: Path, rename: Rename = system_rename) -> None:
    """Rename the folder `source` to `target`. Raises `OSError`; `FileExistsError` if `target` exists."""
    try:
        rename(source, target, RenameMode.NO_REPLACE)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        # A plain rename rejects a target that holds something, but replaces an empty folder.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)


@contextmanager
def locked(folder: Path, *, create: bool) -> Iterator[bool]:
    """Lock `folder` while the block runs. Yield False if another process holds the lock or has removed it.

    The system releases the lock when the process ends, however it ends. Writers `create` the lock file. On a file
    system without locks they proceed, and no other process takes their folders for abandoned. Raises `OSError` if the
    lock file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    lock = os.open(folder / LOCK, flags, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock).st_nlink > 0
        except BlockingIOError:
            held = False
        except OSError:
            held = create
        yield held
    finally:
        os.close(lock)


def sync_tree(root: Path) -> None:
    """Wait until the disk holds the folder `root` and everything below it. Raises `OSError`."""
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        # list() raises what a thread raised.
        list(pool.map(lambda path: sync_folder(path) if path.is_dir() else _sync(path), (root, *root.rglob("*"))))


def sync_folder(folder: Path) -> None:
    """Wait until the disk holds the names in `folder`; their contents may follow later. Raises `OSError`."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
