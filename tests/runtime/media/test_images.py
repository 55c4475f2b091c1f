"""Images come in from files, Pillow and numpy; whatever is wrong with one is an `ImageError` that says what to do."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from sinkprune import Pipeline
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media.images import MOST_PIXELS, read_image, to_rgb


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def refusal(path: Path) -> str:
    """The message a file is refused with, which must name it and say what to do."""
    with pytest.raises(ImageError) as caught:
        read_image(path)
    message = str(caught.value)
    assert f"'{path}'" in message
    assert message.rstrip(".").split(". ")[-1].split()[0] in ("Give", "Scale", "Crop")
    return message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.jpg")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.png"
    path.touch()
    assert "is empty (0 bytes)" in refusal(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_image_is_refused(kind: str, share: float, photo: Image.Image, tmp_path: Path) -> None:
    data = encoded(photo, kind)
    path = tmp_path / f"truncated.{kind.lower()}"
    path.write_bytes(data[: int(share * len(data))])
    message = refusal(path)
    assert "damaged or truncated" in message or "not an image Pillow can read" in message


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_file_that_ends_within_its_pixels_is_called_truncated(
    kind: str, photo: Image.Image, tmp_path: Path
) -> None:
    data = encoded(photo, kind)
    path = tmp_path / "half"
    path.write_bytes(data[: len(data) // 2])
    assert "damaged or truncated" in refusal(path)


@pytest.mark.parametrize("place", [1, 11, 16, 34, 0.3, 0.7])
def test_a_png_with_an_altered_byte_is_refused(place: float, photo: Image.Image, tmp_path: Path) -> None:
    data = bytearray(encoded(photo, "PNG"))
    data[int(place * len(data)) if place < 1 else int(place)] ^= 1
    path = tmp_path / "altered.png"
    path.write_bytes(data)
    refusal(path)


def test_text_named_jpg_is_refused_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "notes.jpg"
    path.write_text("this is no photo\n")
    message = refusal(path)
    assert "not an image" in message
    assert "17 bytes" in message


def png_that_claims(width: int, height: int) -> bytes:
    """A tiny valid PNG file whose header promises `width` x `height` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


def test_a_decompression_bomb_is_refused_by_its_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png_that_claims(60000, 60000))
    message = refusal(path)
    assert "too large" in message
    assert str(MOST_PIXELS) in message


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


def test_a_single_pixel_is_an_image(tmp_path: Path) -> None:
    path = tmp_path / "pixel.png"
    Image.new("L", (1, 1), 77).save(path)
    assert read_image(path).getpixel((0, 0)) == (77, 77, 77)


def test_a_path_may_be_a_string_and_the_pixels_are_those_transformers_reads(photo_file: Path) -> None:
    assert np.array_equal(np.asarray(read_image(str(photo_file))), np.asarray(load_image(str(photo_file))))


def test_reading_leaves_no_open_file_behind(photo_file: Path, recwarn: pytest.WarningsRecorder) -> None:
    image = read_image(photo_file)
    image.load()
    assert getattr(image, "fp", None) is None
    assert not recwarn.list


def test_an_rgb_array_becomes_the_same_pixels(photo: Image.Image) -> None:
    array = np.asarray(photo)
    assert np.array_equal(np.asarray(to_rgb(array)), array)
    assert np.array_equal(np.asarray(to_rgb(array[::-2, ::3])), array[::-2, ::3])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 4, 3), np.float32),
        ((4, 4, 3), np.uint16),
        ((4, 4, 3), np.int8),
        ((4, 4, 3), np.bool_),
        ((4, 4), np.uint8),
        ((4, 4, 1), np.uint8),
        ((4, 4, 4), np.uint8),
        ((3, 4, 4), np.uint8),
        ((1, 4, 4, 3), np.uint8),
        ((0, 4, 3), np.uint8),
        ((4, 0, 3), np.uint8),
        ((), np.uint8),
    ],
    ids=str,
)
def test_an_array_of_another_kind_is_refused_with_what_was_found(shape: tuple[int, ...], dtype: Any) -> None:
    with pytest.raises(ImageError) as caught:
        to_rgb(np.zeros(shape, dtype))
    message = str(caught.value)
    assert f"{np.dtype(dtype)}{list(shape)}" in message
    assert "expected uint8 [height,width,3]" in message


@pytest.mark.parametrize("image", [None, b"\xff\xd8\xff", 3, [[0]]], ids=lambda image: type(image).__name__)
def test_what_is_no_image_is_refused_with_its_type(image: Any, pipeline: Callable[..., Pipeline]) -> None:
    with pytest.raises(ImageError, match=rf"is a {type(image).__name__}, expected a Pillow image"):
        pipeline("gqa-112").generate(image, "What is this?")


def test_a_pillow_image_that_cannot_be_decoded_is_refused(photo: Image.Image, tmp_path: Path) -> None:
    data = encoded(photo, "JPEG")
    path = tmp_path / "half.jpg"
    path.write_bytes(data[: len(data) // 2])
    with Image.open(path) as lazy, pytest.raises(ImageError, match="truncated"):
        to_rgb(lazy)


def test_the_pipeline_takes_file_path_pillow_image_and_array_alike(
    pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path
) -> None:
    pipe = pipeline("gqa-112")
    path = tmp_path / "photo.png"
    photo.save(path)
    answers = [
        pipe.generate(image, "What is this?", max_new_tokens=4).token_ids
        for image in (path, str(path), photo, np.asarray(photo))
    ]
    assert answers == answers[:1] * 4


def test_the_pipeline_names_the_file_of_a_panorama_and_its_size(
    pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    path = tmp_path / "panorama.png"
    Image.new("RGB", (90000, 10)).save(path)
    with pytest.raises(ImageError) as caught:
        pipeline("gqa-112").generate(path, "What is this?")
    assert "90000x10" in str(caught.value)
    assert str(path) in str(caught.value)
