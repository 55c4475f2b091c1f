"""Whether the blocks of a GIF or Matroska (MKV, WebM) file lead from one to the next up to the end.

Only the blocks' sizes are read, not what is in them. Kept, because nothing maintained sees all
of it: PyAV sees no cut, Pillow none between a GIF's blocks, MediaInfo none in a GIF, and one in every live recording.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

# Matroska's elements whose content is elements
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
# All ones, as live recordings leave it
_UNKNOWN = {2 ** (7 * width) - 1 for width in range(1, 9)}


def gif_is_whole(path: Path) -> bool:
    """Whether extensions and images (GIF89a, appendix B) follow each other up to the trailer."""
    data = path.read_bytes()
    place = 13 + _table(data[10:11])
    while place < len(data):
        kind = data[place]
        if kind == 0x3B:
            return True
        if kind not in (0x21, 0x2C):
            return False
        place += 2 if kind == 0x21 else 11 + _table(data[place + 9 : place + 10])
        while place < len(data) and data[place]:
            place += 1 + data[place]
        place += 1
    return False


def _table(flags: bytes) -> int:
    """Bytes of the colour table that `flags` announce."""
    return 3 * 2 ** ((flags[0] & 7) + 1) if flags and flags[0] & 0x80 else 0


def matroska_is_whole(path: Path) -> bool:
    """Whether elements (RFC 8794) follow each other up to the segment's end, or the file's where that is unknown."""
    length = path.stat().st_size
    end, place = length, 0
    with path.open("rb") as file:
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
    """A number of as many bytes as its first has zeros in front, and one more; None where there is none."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    width = 9 - first[0].bit_length()
    rest = file.read(width - 1)
    if len(rest) < width - 1:
        return None
    head = first[0] if keep_length else first[0] & (0x7F >> (width - 1))
    return int.from_bytes(bytes([head]) + rest, "big")
