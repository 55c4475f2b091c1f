"""Pictures of strangers, in files and in memory: only the formats we name, within stated limits; all else is an
`ImageError`.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media import images
from sinkprune.runtime.media.images import FORMATS, MOST_PIXELS, MOST_WEBP_PIXELS, read_image, to_rgb
from support.programs.slow_cases import slow

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 moveto\nshowpage\n%%EOF\n"
# Run in a process of its own: the peak of what a picture adds to the libraries.
_PEAK = """
import re, sys
from sinkprune.runtime.media.images import read_image
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
read_image(sys.argv[1])
print(peak() - before)
"""


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def named(folder: Path, data: bytes, name: str = "photo.jpg") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_an_eps_named_jpg_starts_no_ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "called"
    program = named(tmp_path, f"#!/bin/sh\necho called >> '{trace}'\n".encode(), "gs")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ImageError, match=r"photo\.jpg': the image has no known format"):
        read_image(named(tmp_path, EPS))
    assert not trace.exists()
    with pytest.raises(OSError), Image.open(tmp_path / "photo.jpg") as opened:
        opened.load()
    assert trace.exists(), "the trap does not work"


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_are_read_by_what_they_hold_not_by_their_name(
    kind: str, tmp_path: Path, photo: Image.Image
) -> None:
    data = encoded(photo, kind)
    with Image.open(io.BytesIO(data)) as expected:
        assert np.array_equal(np.asarray(read_image(named(tmp_path, data, "photo.eps"))), expected.convert("RGB"))


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.jpg")
    with pytest.raises(ImageError, match=r"fifo\.jpg' is a FIFO, expected a regular file\. Give a JPEG"):
        read_image(tmp_path / "fifo.jpg")
    with pytest.raises(ImageError, match="is a device"):
        read_image("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(ImageError, match="is a socket"):
            read_image(tmp_path / "socket")
    with pytest.raises(ImageError, match="is a folder"):
        read_image(tmp_path)
    for name in ("none.jpg", "nul\0.jpg", "\ud800.jpg", "x" * 300):
        with pytest.raises(ImageError):
            read_image(tmp_path / name)


def test_what_is_no_whole_picture_is_refused(tmp_path: Path, photo: Image.Image) -> None:
    jpeg = encoded(photo, "JPEG")
    half = jpeg[: len(jpeg) // 2]
    for content, message in (
        (b"", "the image has 0 bytes"),
        (b"this is no photo\n", r"no known format.*17 bytes"),
        (half, "truncated"),
    ):
        with pytest.raises(ImageError, match=rf"photo\.jpg': .*{message}.* Give a"):
            read_image(named(tmp_path, content))
    with Image.open(io.BytesIO(half)) as lazy, pytest.raises(ImageError, match="truncated"):
        to_rgb(lazy)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("PNG", (MOST_PIXELS // 8192 + 1, 8192)),
        ("GIF", (MOST_PIXELS // 8192 + 1, 8192)),
        slow(("WEBP", (8192, 4097))),
    ],
)
def test_one_column_too_many_is_refused_before_decoding(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    most = MOST_WEBP_PIXELS if kind == "WEBP" else MOST_PIXELS
    assert most < size[0] * size[1] < 1.01 * most
    path = named(tmp_path, encoded(Image.new("L", size), kind))
    # No pixels are left, because the header alone is read.
    path.write_bytes(path.read_bytes()[: 60 if kind == "PNG" else None])
    with pytest.raises(ImageError, match=rf"photo\.jpg'.*has {size[0]}x{size[1]} pixels.*at most {most}.*Scale it"):
        read_image(path)


def test_what_cameras_append_to_a_jpeg_is_ignored(tmp_path: Path, photo: Image.Image) -> None:
    """Motion photos have a video after the picture, and a thumbnail within the EXIF data."""
    data = encoded(photo, "JPEG", progressive=True)
    thumbnail = b"\xff\xe1\x0f\xff" + b"\xff\xda" * 0x7FE + b"\0"
    camera = data[:2] + thumbnail + data[2:] + b"\0\2" + b"\xff\xda\0\2" * 1000
    with Image.open(io.BytesIO(data)) as expected:
        assert np.array_equal(np.asarray(read_image(named(tmp_path, camera))), expected.convert("RGB"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "rows"),
    [
        ("RGB", "JPEG", 8192),
        ("RGBA", "PNG", 8192),
        ("I;16", "PNG", 8192),
        ("RGBA", "TIFF", 8192),
        ("P", "GIF", 8192),
        ("RGBA", "WEBP", 4096),
    ],
)
def test_the_largest_pictures_take_less_than_a_gigabyte(mode: str, kind: str, rows: int, tmp_path: Path) -> None:
    picture = Image.new("RGBA", (8192, rows), (200, 100, 50, 90))
    if mode == "I;16":
        picture = Image.fromarray(np.full((rows, 8192), 999, np.uint16))
    elif mode != "RGBA":
        picture = picture.convert("RGB").convert(mode)
    options: dict[str, object] = {"transparency": 3} if mode == "P" else {}
    exif = Image.Exif()
    exif[0x112] = 6
    options |= {"progressive": True, "exif": exif} if kind == "JPEG" else {}
    path = named(tmp_path, encoded(picture, kind, **options))
    done = subprocess.run([sys.executable, "-c", _PEAK, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9


def test_greyscale_of_16_bits_is_scaled_by_its_range_and_turned_and_its_transparent_value_is_white(
    tmp_path: Path,
) -> None:
    """Also in more than one strip."""
    depths = np.linspace(0, 65535, 1201 * 1003).astype(np.uint16).reshape(1201, 1003)
    path = named(tmp_path, encoded(Image.fromarray(depths), "PPM"))
    with Image.open(path) as opened:
        for found in (read_image(path), to_rgb(opened)):
            assert (np.asarray(found) == np.rint(depths / 257).astype(np.uint8)[..., None]).all()
    exif = Image.Exif()
    exif[0x112] = 6
    small = Image.fromarray(np.array([[0, 257], [514, 65535]], np.uint16))
    path = named(tmp_path, encoded(small, "PNG", exif=exif, transparency=514))
    assert np.asarray(read_image(path))[..., 0].tolist() == [[255, 0], [255, 1]]


def test_reading_files_warns_of_nothing_and_leaves_the_warnings_of_a_program(
    photo_file: Path, tmp_path: Path
) -> None:
    """Pillow warns of EXIF data that are cut off, and here a warning is an error."""
    before, cut_off = [*warnings.filters], b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03"
    untidy = named(tmp_path, encoded(Image.new("RGB", (8, 8)), "JPEG", exif=cut_off))
    assert read_image(untidy).size == (8, 8)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert {image.size for image in pool.map(read_image, [photo_file] * 8)} == {(600, 400)}
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="my own"), images._PILLOW_WARNINGS:
        warnings.warn("my own", stacklevel=1)


def test_values_of_another_kind_are_refused_with_what_was_found(tmp_path: Path) -> None:
    for dtype in (np.int32, np.float32):
        picture = Image.fromarray(np.ones((4, 4), dtype))
        path = named(tmp_path, encoded(picture, "TIFF"))
        for call, given in ((read_image, path), (to_rgb, picture)):
            with pytest.raises(ImageError, match=r"has 32 bits a channel \(mode [IF]\), expected 8 or 16\. Scale"):
                call(given)
    for shape, dtype in (((4, 4, 3), "float32"), ((4, 4), "uint8"), ((3, 4, 4), "uint8"), ((1, 4, 4, 3), "uint8")):
        with pytest.raises(ImageError) as caught:
            to_rgb(np.zeros(shape, dtype))
        assert f"{dtype}{list(shape)}, expected uint8 [height,width,3]" in str(caught.value)
    with pytest.raises(ImageError, match="an array with a mask"):
        to_rgb(np.ma.masked_equal(np.zeros((4, 4, 3), np.uint8), 0))
    assert to_rgb(np.ma.masked_equal(np.zeros((4, 4, 3), np.uint8), 1)).size == (4, 4)
