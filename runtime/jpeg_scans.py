"""How many scans a JPEG has: how often its decoder goes over all pixels.

Kept, because Pillow neither counts nor limits them: one of 122 bytes costs as much time as a whole picture.
"""

from __future__ import annotations

import re

# Two bytes that end what stands before: a marker, but no escaped 0xFF and none that only restarts the decoder.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_END, _SCAN, _WITHOUT_LENGTH = 0xD9, 0xDA, (0x01, 0xD8)


def count_scans(data: bytes) -> int:
    """The scans of the first image in a JPEG file (ITU-T T.81, annex B); others, as cameras append, do not count."""
    scans = place = 0
    while found := _MARKER.search(data, place):
        place, kind = found.end(), data[found.end() - 1]
        if kind == _END:
            break
        scans += kind == _SCAN
        if kind not in _WITHOUT_LENGTH:
            place += max(2, int.from_bytes(data[place : place + 2], "big"))
    return scans
