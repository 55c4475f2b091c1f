"""Image files to RGB images, as transformers' image processors take them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array

# Pillow reports damaged files by all of these.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError)


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """The RGB image in a file, turned as its EXIF data says; raises `ImageError`."""
    file = Path(path)
    if file.is_dir():
        raise ImageError(
            f"image '{file}' is a folder, expected a file. Give a JPEG, PNG, WebP, BMP, GIF or TIFF file."
        )
    if not file.is_file():
        raise ImageError(f"image '{file}': found no such file. Give a JPEG, PNG, WebP, BMP, GIF or TIFF file.")
    if file.stat().st_size == 0:
        raise ImageError(f"image '{file}' is empty (0 bytes). Give a complete image file.")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images and of untidy EXIF data; neither is the user's concern here.
            warnings.simplefilter("ignore")
            with Image.open(file) as image:
                return to_rgb(image)
    except UnidentifiedImageError as error:
        raise ImageError(
            f"'{file}' is not an image Pillow can read ({file.stat().st_size} bytes). "
            "Give a JPEG, PNG, WebP, BMP, GIF or TIFF file."
        ) from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"image '{file}' is too large: {error}. Scale it down first.") from error
    except ImageError as error:
        raise ImageError(f"'{file}': {error}") from error
    except _DAMAGE as error:
        raise ImageError(f"image '{file}' is damaged or truncated: {error}. Give a complete image file.") from error


def to_rgb(image: Image.Image | Array) -> Image.Image:
    """An RGB image from a Pillow image or a [height,width,3] uint8 array; raises `ImageError`."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ImageError(f"found an array {image.dtype}{list(image.shape)}, expected uint8 [height,width,3].")
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ImageError(
            f"the image is a {type(image).__name__}, expected a Pillow image, a uint8 [height,width,3] array or the "
            "name of a file."
        )
    try:
        turned = ImageOps.exif_transpose(image)
        has_alpha = "A" in turned.getbands() or turned.info.get("transparency") is not None
        return _on_white(turned) if has_alpha else turned.convert("RGB")
    except _DAMAGE as error:
        raise ImageError(f"the image is damaged or truncated: {error}. Give a complete image.") from error


def _on_white(image: Image.Image) -> Image.Image:
    """Transparency over white, as the image processors of transformers show it to a model."""
    opaque = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", opaque.size, (255, 255, 255, 255)), opaque).convert("RGB")
