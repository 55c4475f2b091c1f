"""Files that are held from the moment they are checked: what was checked is what is loaded.

Small files are read at once and kept. Larger ones stay open, and are read, mapped and summed through that one open
file. A library that takes nothing but a path is given it within `HeldFile.by_path`, which finds out afterwards
whether it led to the checked bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from sinkprune.contract.files.untrusted import UnreadableError, open_regular, pread, read_all

_SMALL = 1 << 20
_BLOCK = 1 << 22
_ALTERED = "was altered or replaced since it was opened"


class _Stamp(NamedTuple):
    """What changes with a file's content; `ctime_ns` cannot be set by a program, but changes with links too."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class HeldFile:
    """A regular file that was opened once, without following a link.

    Every method reads the same file, also when its name is removed or leads to another by now. A file that cannot be
    read, or was altered since it was opened, raises what `refusal` makes of the reason, which goes on from the file's
    name.
    """

    def __init__(self, path: Path, refusal: Callable[[str], Exception]) -> None:
        self.path, self._refusal = path, refusal
        try:
            with closing(open_regular(path, follow_links=False)) as file:
                self._stamp = _stamp(os.fstat(file.fileno()))
                self.size = self._stamp.size
                self._bytes = read_all(file, _SMALL) if self.size <= _SMALL else None
                if self._bytes is None:
                    self._descriptor = os.dup(file.fileno())
                    self._close = weakref.finalize(self, os.close, self._descriptor)
        except UnreadableError as error:
            raise refusal(str(error)) from error
        except OSError as error:
            # The process has as many files open as it may.
            raise refusal(f"cannot be held open: {error.strerror}") from error

    def read(self, limit: int) -> bytes:
        """All its bytes, of which there must be at most `limit`."""
        if self.size > limit:
            raise self._refusal(f"has {self.size} bytes, expected at most {limit}")
        return self.read_at(0, self.size)

    def read_at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on."""
        if self._bytes is not None:
            data = self._bytes[offset : offset + count]
        else:
            data = pread(self._descriptor, count, offset)
            self._check_content()
        if len(data) != count:
            raise self._refusal(f"ends before byte {offset + count}")
        return data

    def sha256(self, on_bytes: Callable[[int], None] = lambda count: None) -> str:
        """The sha256 of its bytes, in hexadecimal; `on_bytes` is told of progress."""
        digest = hashlib.sha256()
        if self._bytes is not None:
            digest.update(self._bytes)
            on_bytes(self.size)
            return digest.hexdigest()
        buffer, offset = memoryview(bytearray(_BLOCK)), 0
        while count := os.preadv(self._descriptor, [buffer], offset):
            digest.update(buffer[:count])
            on_bytes(count)
            offset += count
        self._check_content()
        return digest.hexdigest()

    def copy(self, path: Path) -> None:
        """Write its bytes into the new file `path`; raises `OSError` where that cannot be written."""
        with path.open("xb") as file:
            for offset in range(0, self.size, _BLOCK):
                file.write(self.read_at(offset, min(_BLOCK, self.size - offset)))

    @contextmanager
    def mapped(self) -> Iterator[mmap.mmap | bytes]:
        """Its bytes in memory that the file backs, while the block runs; who truncates the file meanwhile ends the
        process."""
        if self._bytes is not None:
            yield self._bytes
            return
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as mapping:
            yield mapping
        self._check_content()

    @contextmanager
    def by_path(self) -> Iterator[Path]:
        """Its path, for a library that takes nothing else; the name must lead to the same, unaltered file before the
        block and after it."""
        self._check_name()
        yield self.path
        self._check_name()

    def altered(self) -> Exception:
        """What to raise for content that is not what it was when the file was opened."""
        return self._refusal(_ALTERED)

    def remove(self) -> None:
        """Remove it from its folder, and let go of it: its place on the disk is free. It must not be read again.

        A name that leads to another file is left alone, and refused.
        """
        self._check_name()
        self.path.unlink()
        if self._bytes is None:
            self._close()

    def _check_content(self) -> None:
        # A new export beside it removes the name, which alters ctime and no byte.
        if _stamp(os.fstat(self._descriptor))[:4] != self._stamp[:4]:
            raise self.altered()

    def _check_name(self) -> None:
        try:
            same = _stamp(self.path.lstat()) == self._stamp
        except OSError:
            same = False
        if not same:
            raise self.altered()


def any_is_mapped(files: Iterable[HeldFile]) -> bool:
    """Return whether this process maps one of the `files` into its memory; False where the system lists no maps."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return False
    # By the inode alone, before the path: on overlay file systems the device listed here is another.
    return any(re.search(rb" %d +/" % file._stamp.inode, maps) for file in files)


def _stamp(found: os.stat_result) -> _Stamp:
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
