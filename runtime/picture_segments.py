"""What JPEG and PNG files are made of, counted before Pillow reads them.

Kept, because Pillow bounds neither: it walks over millions of empty segments in Python, and decodes a picture anew
for each scan.
"""

from __future__ import annotations

import re
from typing import BinaryIO, NamedTuple

# Two bytes that end what stands before: a marker, but no escaped 0xFF and none that only restarts the decoder.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_END, _SCAN, _WITHOUT_LENGTH = 0xD9, 0xDA, (0x01, 0xD8)
_PNG = b"\x89PNG\r\n\x1a\n"
# The length, the name and the sum of a chunk
_CHUNK_BYTES = 12


class JpegParts(NamedTuple):
    """What the first image in a JPEG file is made of."""

    segments: int
    """Markers, each with what belongs to it."""
    scans: int
    """How often its decoder goes over all pixels."""


def count_jpeg_parts(data: bytes, most: int) -> JpegParts:
    """The parts of the first image in a JPEG file (ITU-T T.81, annex B); others, as cameras append, do not count.

    Beyond `most` segments it is not read on.
    """
    scans = segments = place = 0
    while segments <= most and (found := _MARKER.search(data, place)):
        place, kind = found.end(), data[found.end() - 1]
        segments += 1
        if kind == _END:
            break
        scans += kind == _SCAN
        if kind not in _WITHOUT_LENGTH:
            place += max(2, int.from_bytes(data[place : place + 2], "big"))
    return JpegParts(segments, scans)


def count_png_chunks(file: BinaryIO, most: int) -> int:
    """The chunks of a PNG file (ISO/IEC 15948, clause 5), 0 of another; beyond `most` it is not read on.

    The position in the file is left at its start.
    """
    file.seek(0)
    chunks, place = 0, len(_PNG)
    if file.read(len(_PNG)) == _PNG:
        while chunks <= most and len(length := file.read(4)) == 4:
            chunks += 1
            place += _CHUNK_BYTES + int.from_bytes(length, "big")
            file.seek(place)
    file.seek(0)
    return chunks
