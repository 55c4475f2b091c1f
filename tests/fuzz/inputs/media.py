"""Small real pictures and clips of every format that this machine can write."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from fuzz.subjects import PHOTOS, silent_libraries
from support.models.video_files import write_video

# By Pillow's name of the format: the modes that decoders handle differently.
_FORMATS: dict[str, tuple[str, ...]] = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "RGBA", "P", "I;16", "1", "LA"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("RGB", "P", "1"),
    "GIF": ("P", "L"),
    "TIFF": ("RGB", "CMYK", "F", "1", "I;16"),
    "AVIF": ("RGB",),
    "JPEG2000": ("RGB", "RGBA"),
    "ICO": ("RGBA",),
    "PPM": ("RGB", "L", "I;16"),
    "EPS": ("RGB",),
}
_MODES = {mode for modes in _FORMATS.values() for mode in modes}
_EXIF = b"Exif\x00\x00MM\x00*\x00\x00\x00\x08" + bytes(6)
_VARIANTS: dict[str, dict[str, Any]] = {
    "JPEG-progressive": {"progressive": True, "exif": _EXIF, "icc_profile": b"x" * 99},
    "PNG-animated": {"save_all": True},
    "GIF-animated": {"save_all": True},
    "TIFF-pages": {"save_all": True, "compression": "tiff_deflate"},
}
"""Other options of formats, by a name that begins with the format's."""
_CLIPS = {
    ".mp4": "mpeg4",
    ".mkv": "mpeg4",
    ".webm": "libvpx",
    ".mov": "libx264",
    ".avi": "mjpeg",
    ".gif": "gif",
    ".hevc.mp4": "libx265",
}


@cache
def pictures() -> dict[str, bytes]:
    """Return pictures by format and mode, without formats that this Pillow cannot write."""
    photo = Image.open(PHOTOS / "chelsea.jpg").resize((96, 64))
    # Only grey pictures convert to 16 bits.
    by_mode = {mode: photo.convert("L").convert(mode) if mode == "I;16" else photo.convert(mode) for mode in _MODES}
    made = {f"{name}-{mode}": _saved(by_mode[mode], name) for name, modes in _FORMATS.items() for mode in modes}
    pages = {"append_images": [photo.rotate(90), photo.rotate(180)]}
    for name, options in _VARIANTS.items():
        more = pages if "save_all" in options else {}
        made[name] = _saved(photo, name.partition("-")[0], **options, **more)
    return {name: data for name, data in made.items() if data}


def _saved(picture: Image.Image, name: str, **options: Any) -> bytes:
    """Return a picture in the format `name`; b"" if this Pillow cannot write it."""
    buffer = io.BytesIO()
    try:
        picture.save(buffer, name, **options)
    except (OSError, KeyError, ValueError):
        return b""
    return buffer.getvalue()


@cache
def clips() -> dict[str, bytes]:
    """Return clips by the ending of their names, without codecs that this PyAV lacks."""
    import av

    frames = [Image.open(PHOTOS / "rocket.jpg").resize((96, 64)).rotate(turn) for turn in range(0, 30, 5)]
    made = {}
    with tempfile.TemporaryDirectory() as folder, silent_libraries():
        for ending, codec in _CLIPS.items():
            path = Path(folder) / f"clip{ending}"
            try:
                write_video(path, frames, 25, codec=codec)
            except (av.error.FFmpegError, ValueError):
                continue
            made[ending] = path.read_bytes()
    return made
