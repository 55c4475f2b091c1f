"""Checks whether the blocks of a GIF or Matroska (MKV, WebM) file follow each other up to its end.

Only the sizes of blocks are read. No maintained library detects all missing ends: PyAV detects none, Pillow none
between a GIF's blocks, and MediaInfo none in a GIF, but one in every live recording.
"""

from __future__ import annotations

import os
from typing import BinaryIO

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
