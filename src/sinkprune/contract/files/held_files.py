"""Files that stay open from their check until they are loaded, so that the checked bytes are the loaded bytes.

Small files are read into memory at once. Larger ones stay open, and are read, mapped and summed through the open
file. `HeldFile.by_path` serves libraries that take only a path: it checks that the path leads to the same file.
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

from sinkprune.contract.files.untrusted import UnreadableError, open_regular, pread, read_all

_SMALL = 1 << 20
_BLOCK = 1 << 22


class HeldFile:
    """A regular file, opened once without following a link.

    All methods read this file, even if its name is removed or leads to another file. If the file cannot be read, or
    was altered after it was opened, they raise the error that `refusal` makes of the reason. The reason follows the
    file's name.
    """

    def __init__(self, path: Path, refusal: Callable[[str], Exception]) -> None:
        self.path, self._refusal = path, refusal
        try:
            with closing(open_regular(path, follow_links=False)) as file:
                self._found = os.fstat(file.fileno())
                self.size = self._found.st_size
                self._bytes = read_all(file, _SMALL) if self.size <= _SMALL else None
                if self._bytes is None:
                    self._descriptor = os.dup(file.fileno())
                    self._close = weakref.finalize(self, os.close, self._descriptor)
        except UnreadableError as error:
            raise refusal(str(error)) from error
        except OSError as error:
            # The process has too many open files.
            raise refusal(f"cannot be held open: {error.strerror}") from error

    def read(self, limit: int) -> bytes:
        """Return all bytes of the file, of which there must be at most `limit`."""
        if self.size > limit:
            raise self._refusal(f"has {self.size} bytes, expected at most {limit}")
        return self.read_at(0, self.size)

    def read_at(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on."""
        if self._bytes is not None:
            data = self._bytes[offset : offset + count]
        else:
            data = pread(self._descriptor, count, offset)
            self._check_content()
        if len(data) != count:
            raise self._refusal(f"ends before byte {offset + count}")
        return data

    def read_each(self, offsets: Iterable[int], count: int) -> list[bytes]:
        """Return `count` bytes from each of the `offsets` on."""
        return [self.read_at(offset, count) for offset in offsets]

    def sha256(self, on_bytes: Callable[[int], None] = lambda count: None) -> str:
        """Return the sha256 in hexadecimal. `on_bytes` takes the size of each part that is done."""
        digest = hashlib.sha256(self._bytes or b"")
        if self._bytes is not None:
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
        """Write the bytes into the new file `path`. Raises `OSError` if that cannot be written."""
        with path.open("xb") as file:
            for offset in range(0, self.size, _BLOCK):
                file.write(self.read_at(offset, min(_BLOCK, self.size - offset)))

    @contextmanager
    def mapped(self) -> Iterator[mmap.mmap | bytes]:
        """Map the file into memory for the block. If another process truncates the file meanwhile, this one dies."""
        if self._bytes is not None:
            yield self._bytes
            return
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as mapping:
            yield mapping
        self._check_content()

    @contextmanager
    def by_path(self) -> Iterator[Path]:
        """Yield the path, which must lead to the same, unaltered file before and after the block."""
        self._check_name()
        yield self.path
        self._check_name()

    def altered(self) -> Exception:
        """Return the error for content that changed after the file was opened."""
        return self._refusal("was altered or replaced since it was opened")

    def remove(self) -> None:
        """Remove and close the file, which frees its disk space. It must not be read again.

        If its name leads to another file, that file stays and the error of `altered` is raised.
        """
        self._check_name()
        self.path.unlink()
        if self._bytes is None:
            self._close()

    def _check_content(self) -> None:
        # Without ctime, which changes when another name of the file is removed.
        if _content(os.fstat(self._descriptor)) != _content(self._found):
            raise self.altered()

    def _check_name(self) -> None:
        try:
            found = self.path.lstat()
        except OSError as error:
            raise self.altered() from error
        # With ctime, which no program can set.
        if _content(found) != _content(self._found) or found.st_ctime_ns != self._found.st_ctime_ns:
            raise self.altered()


def any_is_mapped(files: Iterable[HeldFile]) -> bool:
    """Return whether this process maps one of the `files` into memory; False if the system lists no maps."""
    try:
        maps = Path("/proc/self/maps").read_bytes()
    except OSError:
        return False
    # The inode stands before the path. Overlay file systems list another device.
    return any(re.search(rb" %d +/" % file._found.st_ino, maps) for file in files)


def _content(found: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file is altered or replaced."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
