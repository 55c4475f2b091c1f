"""Pictures of strangers, in files and in memory: only the formats we name, within stated limits; all else is an
`ImageError`.
"""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media import images
from sinkprune.runtime.media.images import FORMATS, MOST_PIXELS, MOST_WEBP_PIXELS, read_image, to_rgb
from support.programs.repository import ROOT
from support.programs.slow_cases import slow

CORPUS = sorted((ROOT / "tests" / "fuzz" / "corpus" / "pictures").iterdir())
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


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "DDS", "ICO", "TGA", "PCX"])
def test_other_formats_are_refused_whole(kind: str, tmp_path: Path, photo: Image.Image) -> None:
    try:
        data = encoded(photo.resize((16, 16)), kind)
    except (KeyError, OSError):
        pytest.skip(f"this Pillow writes no {kind}")
    with pytest.raises(ImageError, match="the image has no known format"):
        read_image(named(tmp_path, data))


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
    for name in ("nul\0.jpg", "\ud800.jpg", "x" * 300):
        with pytest.raises(ImageError):
            read_image(tmp_path / name)


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


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_was_once_found_is_read_or_refused(path: Path) -> None:
    try:
        assert read_image(path).mode == "RGB"
    except ImageError as error:
        assert f"'{path}'" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "rows"),
    [
        ("RGB", "JPEG", 8192),
        ("CMYK", "JPEG", 8192),
        ("P", "PNG", 8192),
        ("LA", "PNG", 8192),
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
        picture = picture.convert(mode) if mode == "LA" else picture.convert("RGB").convert(mode)
    options: dict[str, object] = {"transparency": 3} if mode == "P" else {}
    exif = Image.Exif()
    exif[0x112] = 6
    options |= {"progressive": True, "exif": exif} if kind == "JPEG" else {}
    path = named(tmp_path, encoded(picture, kind, **options))
    done = subprocess.run([sys.executable, "-c", _PEAK, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9


def test_greyscale_of_16_bits_is_scaled_by_its_range(tmp_path: Path) -> None:
    """Also in more than one strip."""
    depths = np.linspace(0, 65535, 1201 * 1003).astype(np.uint16).reshape(1201, 1003)
    path = named(tmp_path, encoded(Image.fromarray(depths), "PPM"))
    with Image.open(path) as opened:
        for found in (read_image(path), to_rgb(opened)):
            assert (np.asarray(found) == np.rint(depths / 257).astype(np.uint8)[..., None]).all()


def test_greyscale_of_16_bits_is_turned_and_its_transparent_value_is_white(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    depths = Image.fromarray(np.array([[0, 257], [514, 65535]], np.uint16))
    path = named(tmp_path, encoded(depths, "PNG", exif=exif, transparency=514))
    assert np.asarray(read_image(path))[..., 0].tolist() == [[255, 0], [255, 1]]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_channels_of_32_bits_are_refused(dtype: type[np.generic], tmp_path: Path) -> None:
    picture = Image.fromarray(np.ones((4, 4), dtype))
    message = r"has 32 bits a channel \(mode [IF]\), expected 8 or 16\. Scale its values to 8 bits\."
    with pytest.raises(ImageError, match=message):
        read_image(named(tmp_path, encoded(picture, "TIFF")))
    with pytest.raises(ImageError, match=message):
        to_rgb(picture)


def refusal(path: Path) -> str:
    """Return the message about a file that cannot be read; it must have the file's name and what to do."""
    with pytest.raises(ImageError) as caught:
        read_image(path)
    message = str(caught.value)
    assert f"'{path}'" in message
    assert message.rstrip(".").split(". ")[-1].split()[0] in ("Give", "Scale", "Crop")
    return message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "the image has 0 bytes"),
        (b"this is no photo\n", r"no known format.*17 bytes"),
    ],
)
def test_what_is_no_picture_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "photo.jpg").write_bytes(content)
    assert re.search(message, refusal(tmp_path / "photo.jpg"))
    assert "is a folder" in refusal(tmp_path)


def test_damaged_files_are_read_or_refused_but_never_crash(photo: Image.Image, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    small = photo.resize((64, 48))
    refused = 0
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"):
        data = encoded(small, kind)
        for attempt in range(60):
            damaged = bytearray(data)
            reach = len(damaged) if attempt % 2 else min(200, len(damaged))
            for place in random.integers(0, reach, size=3):
                damaged[place] = random.integers(0, 256)
            if attempt % 3 == 0:
                damaged = damaged[: random.integers(1, len(damaged))]
            path = tmp_path / "damaged"
            path.write_bytes(damaged)
            try:
                assert read_image(path).mode == "RGB"
            except ImageError as error:
                refused += 1
                assert str(path) in str(error)
    assert 60 < refused < 300
    data = encoded(photo, "JPEG")
    with Image.open(io.BytesIO(data[: len(data) // 2])) as lazy, pytest.raises(ImageError, match="truncated"):
        to_rgb(lazy)


def test_threads_that_read_files_leave_the_warnings_of_a_program(photo_file: Path) -> None:
    before = [*warnings.filters]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert {image.size for image in pool.map(read_image, [photo_file] * 8)} == {(600, 400)}
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="my own"), images._PILLOW_WARNINGS:
        warnings.warn("my own", stacklevel=1)


def test_pillow_warns_of_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    # A palette whose transparency is bytes: Pillow warns when it is converted.
    picture = Image.new("P", (2, 2))
    picture.putpalette([1, 2, 3] * 256)
    picture.save(tmp_path / "palette.png", transparency=bytes(256))
    assert read_image(tmp_path / "palette.png").size == (2, 2)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((4, 4, 3), dtype) for dtype in (np.float32, np.uint16, np.int8, np.bool_)),
        *((shape, np.uint8) for shape in ((4, 4), (4, 4, 1), (4, 4, 4), (3, 4, 4), (1, 4, 4, 3))),
        ((), np.uint8),
    ],
    ids=str,
)
def test_an_array_of_another_kind_is_refused_with_what_was_found(shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(ImageError) as caught:
        to_rgb(np.zeros(shape, dtype))
    assert f"{np.dtype(dtype)}{list(shape)}, expected uint8 [height,width,3]" in str(caught.value)


def test_an_array_with_a_mask_is_refused() -> None:
    with pytest.raises(ImageError, match="an array with a mask"):
        to_rgb(np.ma.masked_equal(np.zeros((4, 4, 3), np.uint8), 0))
    assert to_rgb(np.ma.masked_equal(np.zeros((4, 4, 3), np.uint8), 1)).size == (4, 4)
