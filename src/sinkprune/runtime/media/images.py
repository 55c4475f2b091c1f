"""Pictures from files, bytes and arrays: checked by their headers, then decoded."""

from __future__ import annotations

import io
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, cast

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from sinkprune.contract.checks import type_name
from sinkprune.contract.errors import ImageError
from sinkprune.contract.files.untrusted import ForbiddenError, MissingError, UnreadableError, open_regular, url_of
from sinkprune.contract.precision import Array

if TYPE_CHECKING:
    from sinkprune.runtime.media.stored_pixels import StoredPixels

MOST_SECONDS = 10.0
"""The most processor time for decoding: five times that of the largest pictures on a processor of 2020."""
_HEADER_SECONDS, _HEADER_READS = 1.0, 10_000
"""The most processor time and reads for a picture's header, which a server reads before it is the picture's turn.

Those reads take some 40 ms. Exif data that is joined from many segments takes long with few reads.
"""
_MOST_TIMES, _SPARE_BYTES = 2, 1 << 20


class MeteredFile:
    """An open picture file that raises `ImageError` when its decoder reads too much or computes for too long.

    Pillow keeps millions of empty segments, reads the same bytes for every tag that points to them, and decodes
    JPEGs again for each scan. All of its loops read between their steps, so every read checks both limits. A read
    requests no more bytes than the file has, because Python reserves memory for the request first.
    """

    def __init__(self, file: BinaryIO, size: int, cancelled: Event | None = None) -> None:
        """Wrap `file` of `size` bytes, and start to count the time of this thread; `cancelled` ends all reads."""
        self._file, self._size, self._cancelled = file, size, cancelled
        self._left = _MOST_TIMES * size + _SPARE_BYTES
        self._began = time.thread_time()
        self._seconds, self._reads = _HEADER_SECONDS, float(_HEADER_READS)
        self.seek, self.tell = file.seek, file.tell

    def fileno(self) -> int:
        """Return the file's descriptor, which libtiff reads from."""
        return self._file.fileno()

    def end_header(self) -> None:
        """Allow the time for decoding, and any number of reads, because the header was read."""
        self._seconds, self._reads = MOST_SECONDS, math.inf

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` bytes, or all bytes that are left."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise ImageError("nobody needs the image any longer.")
        self._reads -= 1
        late = time.thread_time() - self._began > self._seconds
        if self._reads < 0 or (late and self._reads < math.inf):
            raise ImageError("the image's header has too many parts. Give one that is saved anew.")
        if late:
            raise ImageError(
                f"decoding the image takes more than {MOST_SECONDS:g} seconds of processor time. Give one that is "
                "smaller, or saved anew."
            )
        if count < 0 or count > 1 << 16:
            left = max(0, self._size - self._file.tell())
            count = left if count < 0 else min(count, left)
        data = self._file.read(count)
        self._left -= len(data)
        if self._left < 0:
            raise ImageError("the image refers to the same bytes again and again. Give one that is saved anew.")
        return data


_FORMATS = ("GIF", "PNG", "TIFF", "WEBP")
# JPEGs with several pictures (MPO, CIPA DC-007): the tag of their list, and the word in the type of those that are
# views, as stereo cameras write them. Others are previews, depths and brightnesses of the first.
_MP_ENTRIES, _VIEW = 0xB002, "Multi-Frame"
_NOTED = "sinkprune_frames"


def frame_count(image: Image.Image) -> int:
    """Return the number of frames or pages in the file of an image, as `read_image` and `to_rgb` return it."""
    return int(image.info.get(_NOTED, 1))


def count_frames(image: Image.Image) -> int:
    """Return the number of frames, pages or views of an opened file; of a damaged file, those before the damage."""
    if image.format not in (*_FORMATS, "MPO"):
        return frame_count(image)
    try:
        if image.format == "MPO":
            _, *further = cast(Any, image).mpinfo[_MP_ENTRIES]
            return 1 + sum(_VIEW in entry["Attribute"]["MPType"] for entry in further)
        return int(getattr(image, "n_frames", 1))
    except Exception:
        # The first frame is whole, and the model sees no other.
        return image.tell() + 1


FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""The formats that are read. Some of Pillow's other formats start programs, and others fail in unusual ways."""
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
"""The names of pictures that are written."""
MOST_PIXELS = 1 << 26
"""The most pixels of an image: 8192x8192. Decoding takes less than 1 GB."""
MOST_WEBP_PIXELS = MOST_PIXELS // 2
"""The most pixels of a WebP file: 8192x4096. Its decoder holds each of them four times, and Python's lock."""
MOST_BYTES = 257 << 20
"""The most bytes of an image file: `MOST_PIXELS` of 32 bits, and 1 MiB more."""
NEARLY_BLACK = 26
"""The largest value of 255, a tenth, below which a picture of 16 bits is nearly black."""

# Pillow decodes JPEG files in blocks. Small blocks limit the work between two checks of the time.
_JPEG_BLOCK = 1 << 12
_GIVE = f"Give a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file."
# Of images that Pillow made, too
_FORMATS_OF_8_BITS = ("JPEG", "MPO", None)
_HAD_16_BITS = "sinkprune_had_16_bits"
_Found = TypeVar("_Found")


def open_media(what: str, path: str | os.PathLike[str], error: type[ImageError], give: str) -> BinaryIO:
    """Open the file of a picture or a video, which messages call `what`; raises `error`. `give` is what to do."""
    try:
        return open_regular(path)
    except MissingError as reason:
        url = url_of(path)
        found = f"'{url}' is a URL; download it first" if url else f"'{path}': found no such file"
        raise error(f"{what} {found}. {give}") from reason
    except ForbiddenError as reason:
        raise error(f"{what} '{path}' {reason}. Allow this user to read it.") from reason
    except UnreadableError as reason:
        raise error(f"{what} '{path}' {reason}. {give}") from reason


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Return the RGB image in a file, turned by its EXIF data. Values of 16 bits are scaled to 8 bits.

    Of several frames or pages it is the first; `frame_count` has their number.

    Raises `ImageError` if the file is missing, not regular, none of `FORMATS`, damaged, of 32 bits a channel, larger
    than `MOST_PIXELS`, or exceeds the limits of `MeteredFile`.
    """
    return _read_file(path, _decoded)


def read_header(path: str | os.PathLike[str]) -> tuple[int, bool]:
    """Return how many frames or pages an image file has, and whether a channel has more than 8 bits.

    Decodes no pixels. Raises `ImageError` as `read_image` does, but not for what only decoding finds.
    """
    return _read_file(path, _header)


def _read_file(path: str | os.PathLike[str], read: Callable[[MeteredFile], _Found]) -> _Found:
    with open_media("image", path, ImageError, _GIVE) as file:
        try:
            return _read(file, read)
        except ImageError as error:
            raise ImageError(f"'{path}': {error}") from error


def read_image_bytes(data: bytes, cancelled: Event | None = None) -> Image.Image:
    """Return the RGB image in the bytes of a file, as `read_image` does.

    Raises `ImageError`, also soon after `cancelled` is set.
    """
    return _read(io.BytesIO(data), _decoded, cancelled)


def count_pixels(data: bytes) -> int:
    """Return how many pixels the header in the bytes of a file has; raises `ImageError`, as `read_image` does.

    Those of a WebP file count twice, because they take twice the memory.
    """
    return _read(io.BytesIO(data), _pixels)


def _read(file: BinaryIO, read: Callable[[MeteredFile], _Found], cancelled: Event | None = None) -> _Found:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not 0 < size <= MOST_BYTES:
        raise ImageError(f"the image has {size} bytes, expected 1 to {MOST_BYTES}. {_GIVE}")
    try:
        return read(MeteredFile(file, size, cancelled))
    except UnidentifiedImageError as error:
        raise ImageError(f"the image has no known format ({size} bytes). {_GIVE}") from error


def to_rgb(image: Image.Image | Array) -> Image.Image:
    """Return a Pillow image or a [height,width,3] uint8 array as an RGB image; raises `ImageError`."""
    if isinstance(image, np.ndarray):
        check_array(image)
        return Image.fromarray(image)
    if not isinstance(image, Image.Image):
        raise ImageError(
            f"found {type_name(image)} as the image, expected a Pillow image, a uint8 [height,width,3] array or "
            "the name of a file."
        )
    _check_size(*image.size)
    with _damage_as_error():
        # Counting would drop the pixels of a loaded GIF or TIFF. A later frame is one that the caller chose.
        loaded = image.format in ("GIF", "TIFF") and not getattr(image, "tile", None)
        if loaded or image.tell():
            frames = frame_count(image)
        else:
            frames = count_frames(image)
            image.seek(0)
        if image.format == "TIFF":
            from sinkprune.runtime.media.tiff import check_samples

            check_samples(image)
        stored, turned = _stored(image), ImageOps.exif_transpose(image)
        plain = turned.mode == "RGB" and not turned.has_transparency_data
        found = turned if plain or stored is None else stored.to_rgb(turned)
        return _with_facts(found, frames, stored)


def check_array(array: Array) -> None:
    """Raise `ImageError` for an array that is no picture uint8 [height,width,3]."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ImageError(
            f"found an array {array.dtype}{list(array.shape)}, expected uint8 [height,width,3]. Transpose one of "
            "[3,height,width], turn floats of 0 to 1 into bytes with (array * 255).astype('uint8'), and give grey or "
            "RGBA as a Pillow image, with Image.fromarray(array)."
        )
    if np.ma.is_masked(array):
        raise ImageError("found an array with a mask, which no model sees. Give array.filled(0), or another value.")
    _check_size(array.shape[1], array.shape[0])


def largest_of_16_bits(image: Image.Image) -> int | None:
    """Return the largest value, of 255, of an image that `read_image` or `to_rgb` scaled from 16 bits a channel.

    None for any other. Of those in colour only images that are nearly black now count.
    """
    return _largest_value(image) if _HAD_16_BITS in image.info else None


class FileFacts(NamedTuple):
    """What notes say of a picture's file."""

    frames: int = 1
    """The number of frames in it; the picture is the first."""
    largest: int | None = None
    """The picture's `largest_of_16_bits`."""


def facts_of(picture: object) -> FileFacts:
    """Return the facts of a decoded picture's file; those of clips are the defaults."""
    if not isinstance(picture, Image.Image):
        return FileFacts()
    return FileFacts(frame_count(picture), largest_of_16_bits(picture))


def _largest_value(image: Image.Image) -> int:
    return max(int(most) for _, most in cast(Any, image).getextrema())


def _decoded(file: MeteredFile) -> Image.Image:
    """Return the image in an open file; raises `ImageError`, and `UnidentifiedImageError` for other formats."""
    with _opened(file) as image:
        if image.format == "JPEG":
            image.decodermaxblock = _JPEG_BLOCK
        stored = _stored(image)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        # The file object of a WebP holds its pixels once more.
        image.fp = None
        found = image.convert("RGB") if stored is None else stored.to_rgb(image)
        return _with_facts(found, count_frames(image), stored)


def _stored(image: Image.Image) -> StoredPixels | None:
    """Return how a file stores the pixels of an opened image; None for a JPEG or none, if it is in plain RGB."""
    if image.format in _FORMATS_OF_8_BITS and image.mode == "RGB" and not image.has_transparency_data:
        return None
    from sinkprune.runtime.media.stored_pixels import StoredPixels

    return StoredPixels(image)


@contextmanager
def _opened(file: MeteredFile) -> Iterator[ImageFile.ImageFile]:
    """Open an image whose header is within the limits. Raises what `_decoded` raises, also for what follows."""
    with _damage_as_error():
        if file.read(4)[:2] in (b"II", b"MM"):
            from sinkprune.runtime.media.tiff import check_values

            check_values(file)
        file.seek(0)
        image = Image.open(cast(BinaryIO, file), formats=FORMATS)
        file.end_header()
        _check_size(*image.size, MOST_WEBP_PIXELS if image.format == "WEBP" else MOST_PIXELS)
        if image.format == "TIFF":
            from sinkprune.runtime.media.tiff import check_samples, size_in_tiles

            _check_size(*size_in_tiles(image))
            check_samples(image)
        with image:
            yield image


def _pixels(file: MeteredFile) -> int:
    with _opened(file) as image:
        return image.width * image.height * (2 if image.format == "WEBP" else 1)


def _header(file: MeteredFile) -> tuple[int, bool]:
    with _opened(file) as image:
        stored = _stored(image)
        return count_frames(image), stored is not None and (stored.wide or stored.grey_of_16_bits)


def _with_facts(image: Image.Image, frames: int, stored: StoredPixels | None) -> Image.Image:
    """Return the RGB `image` with its `frame_count`, and whether it had 16 bits. Others stay equal to arrays."""
    if frames > 1:
        image.info[_NOTED] = frames
    if stored is None:
        return image
    if stored.grey_of_16_bits or (stored.wide and _largest_value(image) < NEARLY_BLACK):
        image.info[_HAD_16_BITS] = True
    return image


def _check_size(width: int, height: int, most: int = MOST_PIXELS) -> None:
    if width * height == 0:
        raise ImageError(f"the image has {width}x{height} pixels, expected at least 1x1. Give a complete image.")
    if width * height > most:
        raise ImageError(
            f"the image is too large: it has {width}x{height} pixels, expected at most {most} in all. "
            "Scale it down first."
        )


class _NoPillowWarnings:
    """A context without warnings of Pillow, of large images and of untidy EXIF data, which users need not know.

    Python's filters belong to all threads. So the first of several threads inside changes them, and the last one
    undoes that.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._changed = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._changed = warnings.catch_warnings()
                self._changed.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._changed.__exit__(*error)


_PILLOW_WARNINGS = _NoPillowWarnings()


@contextmanager
def _damage_as_error() -> Iterator[None]:
    """Raise an `ImageError` for any error that Pillow raises."""
    try:
        with _PILLOW_WARNINGS:
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
        # Damaged bytes cause any error of Python's arithmetic: struct.error, IndexError, KeyError ...
        reason = str(error) or type(error).__name__
        raise ImageError(
            f"the image is damaged or truncated: {reason.rstrip('.')}. Give a complete image file."
        ) from error
