"""TIFF files: what Pillow misreads of them, and limits of their tags and tiles."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, cast

from PIL import Image

from sinkprune.contract.errors import ImageError

if TYPE_CHECKING:
    from sinkprune.runtime.media.images import MeteredFile

MOST_TILES = 1 << 16
"""The most strips or tiles: libtiff decodes all of them in one call, which nothing interrupts."""
# Tags (TIFF 6.0), and values of four of them that Pillow may misread
_BITS, _PHOTOMETRIC, _FILL_ORDER, _PLANAR_CONFIGURATION, _SAMPLE_FORMAT = 258, 262, 266, 284, 339
_ROWS_PER_STRIP, _TILE_WIDTH, _TILE_LENGTH = 278, 322, 323
_WHITE_IS_ZERO, _LOW_BIT_FIRST, _PLANES, _SIGNED = 0, 2, 2, 2
_TIFF = re.compile(rb"II[*+]\0|MM\0[*+]")
# The types of tags that are bytes to Pillow, and the most values of another
_BYTES_TYPES, _MOST_VALUES = (1, 2, 6, 7), 1 << 18


def bits(image: Image.Image) -> int:
    """Return the most bits of a channel of an opened TIFF."""
    return int(max(cast(Any, image).tag_v2.get(_BITS, (1,)), default=1))


def white_is_zero(image: Image.Image) -> bool:
    """Return whether the value 0 of an opened TIFF is white."""
    return bool(cast(Any, image).tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO)


def check_samples(image: Image.Image) -> None:
    """Raise `ImageError` for a TIFF whose values Pillow misreads."""
    tags, found = cast(Any, image).tag_v2, bits(image)
    if _SIGNED in tags.get(_SAMPLE_FORMAT, ()) and found <= 16:
        raise ImageError(
            f"the image has signed values of {found} bits, expected unsigned ones. Scale them to 0 to 255."
        )
    usual = found == 8 and tags.get(_PHOTOMETRIC, 0) != _WHITE_IS_ZERO and tags.get(_FILL_ORDER) != _LOW_BIT_FIRST
    if tags.get(_PLANAR_CONFIGURATION) == _PLANES and image.info.get("compression") == "raw" and not usual:
        raise ImageError(
            f"the image has values of {found} bits in separate planes without compression, of which Pillow reads "
            "only those of 8 bits whose 0 is black. Save it with its channels together."
        )


def check_values(file: MeteredFile) -> None:
    """Raise `ImageError` for a TIFF with a tag of too many numbers: Pillow makes an object or a tile of each."""
    file.seek(0)
    head = file.read(16)
    if _TIFF.match(head):
        order, big = "<>"[head[:1] == b"M"], b"+" in head[2:4]
        place, count, entry = ("8xQ", "Q", "HHQ8x") if big else ("4xI", "H", "HHI4x")
        file.seek(struct.unpack_from(order + place, head)[0])
        (entries,) = struct.unpack(order + count, file.read(struct.calcsize(order + count)))
        found = file.read(entries * struct.calcsize(order + entry))
        whole = len(found) // struct.calcsize(order + entry) * struct.calcsize(order + entry)
        for tag, kind, values in struct.iter_unpack(order + entry, found[:whole]):
            if kind not in _BYTES_TYPES and values > _MOST_VALUES:
                raise ImageError(
                    f"tag {tag} of the image has {values} values, expected at most {_MOST_VALUES}. Save it anew."
                )


def size_in_tiles(image: Image.Image) -> tuple[int, int]:
    """Return width and height of all tiles of a TIFF, outside included; raises `ImageError` for too many tiles."""
    tags = cast(Any, image).tag_v2
    width = int(tags.get(_TILE_WIDTH, image.width))
    height = int(tags.get(_TILE_LENGTH, min(image.height, tags.get(_ROWS_PER_STRIP, image.height))))
    if width < 1 or height < 1:
        raise ImageError(f"the image has tiles of {width}x{height} pixels. Give a complete image file.")
    across, down = -(-image.width // width), -(-image.height // height)
    if across * down > MOST_TILES:
        raise ImageError(
            f"the image has {across * down} tiles, expected at most {MOST_TILES}. Save it in larger ones."
        )
    return across * width, down * height
