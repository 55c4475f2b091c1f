"""How a video's frames are turned and mirrored to be shown."""

from __future__ import annotations

import struct
from typing import Any

from PIL import Image

from sinkprune.contract.errors import VideoError

_TURN = Image.Transpose
# By a, b, c and d: the pixel (x, y) is shown at (a x + c y, b x + d y), with y downwards.
_TURNS = {
    (1, 0, 0, 1): None,
    (0, 1, -1, 0): _TURN.ROTATE_270,
    (-1, 0, 0, -1): _TURN.ROTATE_180,
    (0, -1, 1, 0): _TURN.ROTATE_90,
    (-1, 0, 0, 1): _TURN.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): _TURN.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): _TURN.TRANSPOSE,
    (0, -1, -1, 0): _TURN.TRANSVERSE,
}
_ONE = 1 << 16


def turned(frame: Any) -> Image.Image:
    """Return a decoded frame as an RGB image, turned and mirrored as its display matrix says.

    Raises `VideoError` for an angle that is no multiple of 90 degrees.
    """
    image: Image.Image = frame.to_image()
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    found = [round(number / _ONE, 2) for number in (a, b, c, d)]
    turn = tuple(found)
    if turn not in _TURNS:
        raise VideoError(
            f"the video's display matrix is {found}, expected a turn by 0, 90, 180 or 270 degrees. Encode the video "
            "again, turned as it is to be shown."
        )
    how = _TURNS[turn]
    return image if how is None else image.transpose(how)
