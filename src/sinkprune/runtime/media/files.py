"""Files of pictures and videos, read whole or in metered pieces.

Pillow has no bound. It walks over millions of empty segments in Python and keeps each of them, reads the same bytes
for every tag that points to them, and decodes a JPEG again for each scan.

Only the sizes of blocks are read. No maintained library detects all missing ends: PyAV detects none, Pillow none
between a GIF's blocks, and MediaInfo none in a GIF, but one in every live recording.
"""

from __future__ import annotations

import math
import os
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


# Elements of Matroska that contain elements
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
# A size with all bits set is unknown, as in live recordings.
_UNKNOWN = {2 ** (7 * width) - 1 for width in range(1, 9)}


def gif_is_whole(file: BinaryIO) -> bool:
    """Return whether extensions and images (GIF89a, appendix B) of an open file lead up to the trailer."""
    file.seek(10)
    _skip(file, 2 + _colour_table_bytes(file.read(1)))
    while kind := file.read(1):
        if kind == b"\x3b":
            return True
        if kind == b"\x21":
            _skip(file, 1)
        elif kind == b"\x2c":
            _skip(file, 8)
            _skip(file, 1 + _colour_table_bytes(file.read(1)))
        else:
            return False
        while size := int.from_bytes(file.read(1), "big"):
            _skip(file, size)
    return False


def _colour_table_bytes(flags: bytes) -> int:
    """Return the size of the colour table that `flags` announce."""
    return 3 * 2 ** ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def _skip(file: BinaryIO, length: int) -> None:
    file.seek(length, os.SEEK_CUR)


def matroska_is_whole(file: BinaryIO) -> bool:
    """Return whether elements (RFC 8794) of an open file lead up to the end of the segment.

    A segment of unknown size ends with the file.
    """
    length = file.seek(0, os.SEEK_END)
    end, place = length, 0
    while place < end:
        file.seek(place)
        identity = _number(file, keep_length=True)
        size = _number(file)
        if identity is None or size is None:
            return False
        place = file.tell()
        if identity == _SEGMENT and size not in _UNKNOWN:
            end = place + size
        elif identity not in (_SEGMENT, _CLUSTER):
            place += size
    return place == end <= length


def _number(file: BinaryIO, *, keep_length: bool = False) -> int | None:
    """Return a number whose first byte has as many leading zeros as bytes follow; None at the end of the file."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    width = 9 - first[0].bit_length()
    rest = file.read(width - 1)
    if len(rest) < width - 1:
        return None
    head = first[0] if keep_length else first[0] & (0x7F >> (width - 1))
    return int.from_bytes(bytes([head]) + rest, "big")
