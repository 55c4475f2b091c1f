"""Image files to RGB images, as transformers' `load_image` reads them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from sinkprune.errors import ImageError


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """The RGB image in a file, turned as its EXIF data says; raises `ImageError`."""
    file = Path(path)
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
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow reports damaged files by all of these.
        raise ImageError(f"image '{file}' is damaged or truncated: {error}. Give a complete image file.") from error


def to_rgb(image: Image.Image | np.ndarray[Any, Any]) -> Image.Image:
    """An RGB image from a Pillow image or a [height,width,3] uint8 array; raises `ImageError`."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise ImageError(f"found an array {image.dtype}{list(image.shape)}, expected uint8 [height,width,3].")
        return Image.fromarray(image)
    return ImageOps.exif_transpose(image).convert("RGB")
