"""Pictures that would take minutes or gigabytes to decode: one bound refuses them all, whatever their format."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media import images
from sinkprune.runtime.media.image_bytes import ImageBytes
from sinkprune.runtime.media.images import MeteredFile, read_image
from sinkprune.runtime.media.tiff import MOST_TILES

# Seconds that the tests allow, in the place of ten.
_ALLOWED = 0.1
_SIZE = 1 << 20


def saved(kind: str, side: int = 8, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (side, side)).save(buffer, kind, **options)
    return buffer.getvalue()


def gif_of_tiny_comments() -> bytes:
    data = saved("GIF")
    place = data.index(b",", 13)
    return data[:place] + b"!\xfe" + b"\x01x" * _SIZE + b"\0" + data[place:]


def jpeg_of_scans() -> bytes:
    data = saved("JPEG", 2048, progressive=True)
    last = data[data.rindex(b"\xff\xc4", 0, data.rindex(b"\xff\xda")) : -2]
    return data[:-2] + last * 2000 + b"\xff\xd9"


def jpeg_of_exif_segments() -> bytes:
    data = saved("JPEG")
    return data[:2] + (b"\xff\xe1\xff\xffExif\0\0" + bytes(0xFFFF - 8)) * 1000 + data[2:]


def tiff_of_many_tags() -> bytes:
    return tiff((256, 4, 1, 1), (257, 4, 1, 1), *((1000 + number, 4, 1, 0) for number in range(20_000)))


def test_a_picture_that_takes_too_long_is_refused_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture"
    path.write_bytes(jpeg_of_scans())
    monkeypatch.setattr(images, "MOST_SECONDS", _ALLOWED)
    began = time.thread_time()
    with pytest.raises(ImageError, match=r"picture': decoding the image takes more than 0\.1 seconds of processor"):
        read_image(path)
    # What is decoded between two reads comes on top.
    assert time.thread_time() - began < _ALLOWED + 1


def test_decoding_ends_soon_after_it_is_cancelled() -> None:
    picture, began = ImageBytes(jpeg_of_scans(), "picture"), time.monotonic()
    timer = Timer(0.2, picture.cancel)
    timer.start()
    with pytest.raises(ImageError, match=r"^nobody needs the image any longer\."):
        picture.decoded()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("bomb", [gif_of_tiny_comments, jpeg_of_exif_segments, tiff_of_many_tags])
def test_a_header_of_too_many_parts_is_refused_at_once(bomb: Callable[[], bytes]) -> None:
    """A server reads the headers of all requests before their turn, so that seconds would keep others waiting."""
    began = time.thread_time()
    with pytest.raises(ImageError, match=r"^the image's header has too many parts\. Give one that is saved anew\.$"):
        ImageBytes(bomb(), "picture")
    assert time.thread_time() - began < 3


def tiff(*entries: tuple[int, int, int, int], data: bytes = b"") -> bytes:
    """A TIFF of the tags (number, type, count, value), with `data` after them."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(entries))
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4) + data


def tiled_tiff(side: int, *tiles: tuple[int, int, int, int]) -> bytes:
    place = (324, 4, 1, 8)
    return tiff((256, 4, 1, 1), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), place, *tiles)


@pytest.mark.parametrize("tag", [258, 273, 339])
def test_a_tiff_of_too_many_numbers_is_refused_before_they_are_read(tag: int) -> None:
    """Pillow made each place of a strip a tile: 10 million took 1.8 GB and half a minute."""
    large = tiff((256, 4, 1, 64), (257, 4, 1, 64), (tag, 4, 500_000, 200), data=bytes(2_000_200))
    # The same with the other order of bytes, and as BigTIFF
    other = b"MM\0*" + struct.pack(">IHHHII", 8, 1, tag, 4, 500_000, 0) + bytes(4)
    big = b"II+\0\x08\0\0\0" + struct.pack("<QQHHQQ", 16, 1, tag, 4, 500_000, 0) + bytes(8)
    for data in (large, other, big):
        with pytest.raises(ImageError, match=rf"^tag {tag} of the image has 500000 values, expected at most 262144"):
            ImageBytes(data, "picture")


def test_bytes_that_are_read_again_and_again_are_refused() -> None:
    """As tags of a TIFF are that share their bytes; newer Pillows refuse that themselves."""
    file = MeteredFile(io.BytesIO(bytes(1 << 20)), 1 << 20)
    for _ in range(3):
        file.seek(0)
        assert len(file.read()) == 1 << 20
    file.seek(0)
    with pytest.raises(ImageError, match=r"^the image refers to the same bytes again and again\. Give one that is"):
        file.read(1)


def test_a_tiff_whose_tiles_lie_outside_the_picture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(tiled_tiff(1 << 14, (322, 4, 1, 8192), (323, 4, 1, 16)))
    with pytest.raises(ImageError, match=r"has 8192x16384 pixels, expected at most"):
        read_image(path)
    path.write_bytes(tiled_tiff(1 << 20, (322, 4, 1, 1), (323, 4, 1, 1)))
    with pytest.raises(ImageError, match=rf"has 1048576 tiles, expected at most {MOST_TILES}\. Save it in larger"):
        read_image(path)
    path.write_bytes(tiled_tiff(8, (322, 4, 1, 0), (323, 4, 1, 0)))
    with pytest.raises(ImageError):
        read_image(path)
