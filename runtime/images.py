"""Image files to RGB images, as transformers' image processors take them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array
from sinkprune.contract.untrusted import MissingError, UnreadableError, open_regular, read_all
from sinkprune.runtime.picture_segments import count_jpeg_parts, count_png_chunks

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""What an image file may be. Pillow knows more: some start other programs, others fail in ways of their own."""
MOST_PIXELS = 1 << 26
"""The most pixels an image file may have: 8192x8192. It takes less than 1 GB to decode."""
MOST_WEBP_PIXELS = 3 << 24
"""The most pixels a WebP file may have: 8192x6144. Its decoder holds each of them four times."""
MOST_BYTES = 1 << 29
"""The most bytes an image file may have: those of `MOST_PIXELS` of 64 bits."""
MOST_SCANS = 100
"""The most scans a JPEG file may have: ten times what encoders write. Each goes over all pixels again."""

MOST_PARTS = 100_000
"""The most chunks of a PNG file, or segments of a JPEG: Pillow takes microseconds for each."""

_JPEG = b"\xff\xd8"
_GIVE = f"Give a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file."
# Pixels of a picture with alpha that are made opaque at a time.
_STRIP = 1 << 20


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """The RGB image in a file, turned as its EXIF data says.

    Raises `ImageError` for what is no regular file, none of `FORMATS`, damaged, or has more than `MOST_PIXELS`.
    """
    try:
        file = open_regular(path)
    except MissingError as error:
        raise ImageError(f"image '{path}': found no such file. {_GIVE}") from error
    except UnreadableError as error:
        raise ImageError(f"image '{path}' {error}. {_GIVE}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ImageError(f"image '{path}' is empty (0 bytes). Give a complete image file.")
        if size > MOST_BYTES:
            raise ImageError(
                f"image '{path}' is too large: it has {size} bytes, expected at most {MOST_BYTES}. Scale it down."
            )
        try:
            return _decoded(cast(BinaryIO, _Bounded(file, size)))
        except UnidentifiedImageError as error:
            raise ImageError(f"'{path}' is not an image Pillow can read ({size} bytes). {_GIVE}") from error
        except ImageError as error:
            raise ImageError(f"'{path}': {error}") from error


def to_rgb(image: Image.Image | Array) -> Image.Image:
    """An RGB image from a Pillow image or a [height,width,3] uint8 array; raises `ImageError`."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ImageError(f"found an array {image.dtype}{list(image.shape)}, expected uint8 [height,width,3].")
        _check_size(image.shape[1], image.shape[0])
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ImageError(
            f"the image is a {type(image).__name__}, expected a Pillow image, a uint8 [height,width,3] array or the "
            "name of a file."
        )
    _check_size(*image.size)
    with _damage_as_error():
        turned = ImageOps.exif_transpose(image)
        return turned if turned.mode == "RGB" and not _has_alpha(turned) else _opaque(turned)


class _Bounded:
    """An open file, of which no more is asked than it has: Python makes room for what is asked before it reads."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.seek, self.tell, self.fileno = file.seek, file.tell, file.fileno

    def read(self, count: int = -1) -> bytes:
        """Up to `count` bytes, or all that are left."""
        left = max(0, self._size - self._file.tell())
        return self._file.read(left if count < 0 else min(count, left))


def _decoded(file: BinaryIO) -> Image.Image:
    """The image in an open file; raises `ImageError`, and `UnidentifiedImageError` for none of our formats."""
    with _damage_as_error():
        _check_parts(file)
        with Image.open(file, formats=FORMATS) as image:
            _check_size(*image.size, MOST_WEBP_PIXELS if image.format == "WEBP" else MOST_PIXELS)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            # A WebP's pixels stand there once more.
            image.fp = None
            return _opaque(image)


def _check_size(width: int, height: int, most: int = MOST_PIXELS) -> None:
    if width * height > most:
        raise ImageError(
            f"the image is too large: it has {width}x{height} pixels, expected at most {most} in all. "
            "Scale it down first."
        )


def _check_parts(file: BinaryIO) -> None:
    """Refuse more parts than `MOST_PARTS`, or scans than `MOST_SCANS`; leaves the file at its start."""
    parts, scans = count_png_chunks(file, MOST_PARTS), 0
    if file.read(len(_JPEG)) == _JPEG:
        parts, scans = count_jpeg_parts(read_all(file, MOST_BYTES), MOST_PARTS)
    file.seek(0)
    for found, most, what in ((parts, MOST_PARTS, "segments"), (scans, MOST_SCANS, "scans")):
        if found > most:
            raise ImageError(f"the image has {found} {what}, expected at most {most}. Give one that is saved anew.")


@contextmanager
def _damage_as_error() -> Iterator[None]:
    """Whatever Pillow raises over bytes and pixels, as an `ImageError`."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images and of untidy EXIF data; neither is the user's concern here.
            warnings.simplefilter("ignore")
            yield
    except (ImageError, UnidentifiedImageError):
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"the image is too large: it has more than {MOST_PIXELS} pixels. Scale it down first."
        ) from error
    except MemoryError as error:
        raise ImageError("there is not enough memory for the image. Scale it down first.") from error
    except Exception as error:
        # Its readers raise what their arithmetic happens to stumble over: struct.error, IndexError, KeyError ...
        reason = str(error) or type(error).__name__
        raise ImageError(
            f"the image is damaged or truncated: {reason.rstrip('.')}. Give a complete image file."
        ) from error


def _has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _opaque(image: Image.Image) -> Image.Image:
    """A copy in RGB: transparency over white, as the image processors of transformers show it to a model."""
    if not _has_alpha(image):
        return image.convert("RGB")
    opaque, rows = Image.new("RGB", image.size), max(1, _STRIP // max(1, image.width))
    # Strip by strip, because three more copies of a large picture are gigabytes.
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        opaque.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return opaque
