"""Limits of the work that a picture file may cause, because Pillow has none.

It walks over millions of empty segments in Python and keeps each of them, reads the same bytes for every tag that
points to them, and decodes a JPEG again for each scan.
"""

from __future__ import annotations

import math
import time
from threading import Event
from typing import BinaryIO

from sinkprune.contract.errors import ImageError

MOST_SECONDS = 10.0
"""The most processor time for decoding: five times that of the largest pictures on a processor of 2020."""
_HEADER_SECONDS, _HEADER_READS = 1.0, 10_000
"""The most processor time and reads for a picture's header, which a server reads before it is the picture's turn.

Those reads take some 40 ms. Exif data that is joined from many segments takes long with few reads.
"""
_MOST_TIMES, _SPARE_BYTES = 2, 1 << 20


class MeteredFile:
    """An open picture file that raises `ImageError` when its decoder reads too much or computes for too long.

    All of Pillow's loops over a file read between their steps, so every read checks both. A read requests no more
    bytes than the file has, because Python reserves memory for the request first.
    """

    def __init__(self, file: BinaryIO, size: int, cancelled: Event | None = None) -> None:
        """Wrap `file` of `size` bytes, and start to count the time of this thread; `cancelled` ends all reads."""
        self._file, self._size, self._cancelled = file, size, cancelled
        self._left = _MOST_TIMES * size + _SPARE_BYTES
        self._began = time.thread_time()
        self._seconds, self._reads = _HEADER_SECONDS, float(_HEADER_READS)
        self.seek, self.tell = file.seek, file.tell

    def fileno(self) -> int:
        """Return the file's descriptor, which libtiff reads from."""
        return self._file.fileno()

    def end_header(self) -> None:
        """Allow the time for decoding, and any number of reads, because the header was read."""
        self._seconds, self._reads = MOST_SECONDS, math.inf

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` bytes, or all bytes that are left."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise ImageError("nobody needs the image any longer.")
        self._reads -= 1
        late = time.thread_time() - self._began > self._seconds
        if self._reads < 0 or (late and self._reads < math.inf):
            raise ImageError("the image's header has too many parts. Give one that is saved anew.")
        if late:
            raise ImageError(
                f"decoding the image takes more than {MOST_SECONDS:g} seconds of processor time. Give one that is "
                "smaller, or saved anew."
            )
        if count < 0 or count > 1 << 16:
            left = max(0, self._size - self._file.tell())
            count = left if count < 0 else min(count, left)
        data = self._file.read(count)
        self._left -= len(data)
        if self._left < 0:
            raise ImageError("the image refers to the same bytes again and again. Give one that is saved anew.")
        return data
