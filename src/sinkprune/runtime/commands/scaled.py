"""A line on stderr about 16-bit pictures, whose values were scaled to 8 bits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from sinkprune.contract.checks.terminal import escaped
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.media.images import had_16_bits


def warn_scaled(files: Sequence[Path], pictures: Sequence[Picture]) -> None:
    """Print a line for the first image that had 16 bits a pixel, with its largest value in 8 bits.

    `pictures` are those read from `files`, in the same order.
    """
    for file, picture in zip(files, pictures, strict=True):
        if isinstance(picture, Image.Image) and had_16_bits(picture):
            _, largest = picture.convert("L").getextrema()
            # The answer counts, also where stderr takes nothing.
            with suppress(OSError):
                sys.stderr.write(
                    f"{escaped(str(file))}: 16-bit greyscale was divided by 257. Its largest value is now {largest} "
                    "of 255. If that is too dark, scale the picture to 8 bits yourself.\n"
                )
            return
