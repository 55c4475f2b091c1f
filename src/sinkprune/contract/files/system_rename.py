"""Renames that the system does in one step: two folders change places, or one moves where nothing stands."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path


class How(Enum):
    """What a rename does with its target."""

    EXCHANGE = auto()
    """Source and target change places."""
    NO_REPLACE = auto()
    """Nothing may stand at the target: the system raises `FileExistsError`."""


class UnsupportedError(Exception):
    """The system, or the file system, has no such rename."""


Rename = Callable[[Path, Path, How], None]
"""Renames its first path to its second. Raises `OSError`, and `UnsupportedError` with nothing done."""

# By system: the call, its word for "relative to where the process is", and its flags.
_CALLS = {
    "linux": ("renameat2", -100, {How.NO_REPLACE: 1, How.EXCHANGE: 2}),
    "darwin": ("renameatx_np", -2, {How.NO_REPLACE: 4, How.EXCHANGE: 2}),
}


def system_rename(source: Path, target: Path, how: How) -> None:
    """Rename `source` to `target` in one step.

    Raises `OSError`, and `UnsupportedError` where the system or the file system has no such rename (NFS has none).
    """
    name, here, flags = _CALLS.get(sys.platform, ("", 0, {}))
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None) if name else None
    if call is None:
        raise UnsupportedError
    if call(here, os.fsencode(source), here, os.fsencode(target), flags[how]) != 0:
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise UnsupportedError
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def move(source: Path, target: Path, rename: Rename = system_rename) -> None:
    """Rename the folder `source` to `target`, where nothing may stand: raises `FileExistsError`, and `OSError`."""
    try:
        rename(source, target, How.NO_REPLACE)
    except UnsupportedError:
        # The system's plain rename replaces an empty folder, and refuses one that holds something.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)
