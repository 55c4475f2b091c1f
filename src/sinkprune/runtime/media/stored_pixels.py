"""Pixels that files store in other forms than RGB of 8 bits: 16 bits a channel, grey, and transparency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media.tiff import bits, white_is_zero

# Greyscale of 16 bits, by Pillow's mode. A 16-bit PGM, and before Pillow 10.3 a PNG, is of mode "I", as 32 bits are.
_MODES_OF_16_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
_FORMATS_OF_16_BITS = ("PPM", "PNG")
# Modes whose colours are multiplied with alpha, and those of the colours themselves
_MULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
# By Pillow's mode of decoding a PNG: the factor from stored values of grey to values of 8 bits
_SPREAD = {"L;2": 85, "L;4": 17}
# The most pixels of a strip
_STRIP = 1 << 20


class StoredPixels:
    """The pixels of an opened image, as its file stores them."""

    wide: bool
    """Whether the file has more than 8 bits a channel. Of a loaded image only a TIFF tells it."""
    grey_of_16_bits: bool
    """Whether the image is greyscale of 12 or 16 bits."""

    def __init__(self, image: Image.Image) -> None:
        """Read how Pillow is about to decode `image`, because decoding drops the low bits of colours."""
        self._white, self._inverted, self._decoding = 65535, False, ""
        tile = getattr(image, "tile", None)
        if image.format == "TIFF":
            self._white, self._inverted = 2 ** bits(image) - 1, white_is_zero(image)
            self.wide = bits(image) > 8
        elif image.format in _FORMATS_OF_16_BITS and tile:
            # "RGB;16B" of a PNG, and ("RGB", 4095) of a PPM.
            how = cast(Any, tile)[0][3]
            mode, largest = how if isinstance(how, tuple) and len(how) == 2 else (how, 0)
            self.wide = ";16" in mode or largest > 255
            self._decoding = str(how) if image.format == "PNG" else ""
        else:
            self.wide = False
        self.grey_of_16_bits = image.mode in _MODES_OF_16_BITS or (
            image.mode == "I" and image.format in _FORMATS_OF_16_BITS
        )

    def to_rgb(self, image: Image.Image) -> Image.Image:
        """Return the decoded `image` in RGB of 8 bits, with transparency over white; raises `ImageError`."""
        self._correct_transparent(image)
        if self.grey_of_16_bits:
            image = self._with_8_bits(image)
        elif image.mode in ("I", "F"):
            raise ImageError(
                f"the image has 32 bits a channel (mode {image.mode}), expected 8 or 16. Scale its values to 8 bits."
            )
        return _opaque(image)

    def _correct_transparent(self, image: Image.Image) -> None:
        """Correct the transparent colour of a PNG (tRNS), which Pillow compares with values of 8 bits as stored.

        Raises `ImageError` for one of 16 bits a channel, of which Pillow drops the low bytes.
        """
        transparent = image.info.get("transparency")
        if isinstance(transparent, int) and self._decoding in _SPREAD:
            image.info["transparency"] = transparent * _SPREAD[self._decoding]
        if isinstance(transparent, tuple) and (self._decoding == "RGB;16B" or max(transparent) > 255):
            raise ImageError(
                f"the image has a transparent colour of 16 bits a channel, {transparent}, and Pillow keeps 8. Save "
                "it with an alpha channel, or without transparency."
            )

    def _with_8_bits(self, image: Image.Image) -> Image.Image:
        """Return greyscale of 12 or 16 bits scaled to 8. Pillow itself makes all values above 255 white."""
        grey, white = Image.new("L", image.size), self._white
        transparent = image.info.get("transparency")
        for top, strip in strips(image):
            values = np.array(strip, np.uint32)
            if transparent is not None:
                values[values == transparent] = white
            if self._inverted:
                values = white - values
            grey.paste(Image.fromarray(((values * 255 + white // 2) // white).astype(np.uint8)), (0, top))
        return grey


def _opaque(image: Image.Image) -> Image.Image:
    """Return a copy in RGB, with transparency over white, as in the image processors of transformers."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode in _MULTIPLIED:
        image = image.convert(_MULTIPLIED[image.mode])
    opaque = Image.new("RGB", image.size)
    for top, strip in strips(image):
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        opaque.paste(Image.alpha_composite(white, strip.convert("RGBA")).convert("RGB"), (0, top))
    return opaque


def strips(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Yield strips of whole rows after the numbers of their first: copies of large pictures would be gigabytes."""
    rows = max(1, _STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))
