"""Images of files, Pillow and numpy, and the `ImageError` for each that cannot be read."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.media import images
from sinkprune.runtime.media.images import read_image, to_rgb


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


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
    message = str(caught.value)
    assert f"{np.dtype(dtype)}{list(shape)}" in message
    assert "expected uint8 [height,width,3]" in message


def test_an_array_with_a_mask_is_refused() -> None:
    with pytest.raises(ImageError, match="an array with a mask"):
        to_rgb(np.ma.masked_equal(np.zeros((4, 4, 3), np.uint8), 0))
    assert to_rgb(np.ma.masked_equal(np.zeros((4, 4, 3), np.uint8), 1)).size == (4, 4)


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
