"""The line about pictures of 16 bits a channel, whose values were scaled to 8 bits."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune.runtime.media.images import largest_of_16_bits, read_image_bytes, to_rgb
from sinkprune.runtime.media.picture_warnings import facts_of, notes_on
from support.programs.commands import run

MESSAGE = (
    "16 bits a channel were scaled to 8. The largest value is now 16 of 255. If that is too dark, scale the picture "
    "to 8 bits yourself.\n"
)


@pytest.fixture
def depth(tmp_path: Path) -> Path:
    """Millimetres up to 4 metres, as a depth camera writes them."""
    path = tmp_path / "depth.png"
    Image.fromarray(np.linspace(0, 4000, 90 * 90).astype(np.uint16).reshape(90, 90)).save(path)
    return path


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("sinkprune-run", ("--max-new-tokens", 1)),
        ("sinkprune-profile", ("--budgets", "none", "--repeat", 1, "--warmup-rounds", 0, "--new-tokens", 1)),
    ],
)
def test_one_line_names_the_largest_value(
    command: str, options: tuple[object, ...], bundle: Callable[..., Path], depth: Path
) -> None:
    root = bundle("gqa-112", "fp32", ("retain-64",), max_images=3)
    outcome = run(command, root, *("--image", depth) * 2, "--prompt", "What is this?", *options)
    assert (outcome.code, outcome.stderr) == (0, f"{depth}: {MESSAGE}")


def png_of_16_bits(values: np.ndarray, colours: int) -> bytes:
    """Return a PNG of `values` [height,width,channels], of a colour type; Pillow writes none in colour."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colours, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff_of_16_bits(values: np.ndarray, order: str) -> bytes:
    """Return a TIFF of `values` [height,width,3] in bytes of `order`, "<" or ">"."""
    height, width = values.shape[:2]
    data, bits = values.astype(f"{order}u2").tobytes(), 8 + 2 + 9 * 12 + 4
    entries = (
        *((256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, bits), (262, 4, 1, 2), (273, 4, 1, bits + 6)),
        *((277, 4, 1, 3), (278, 4, 1, height), (279, 4, 1, len(data)), (284, 4, 1, 1)),
    )
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}IH", 8, len(entries))
    table = b"".join(struct.pack(f"{order}HHII", *entry) for entry in entries)
    return head + table + bytes(4) + struct.pack(f"{order}3H", 16, 16, 16) + data


def files_in_colour(least: int, most: int) -> dict[str, bytes]:
    """Return files of 16 bits a channel with values from `least` to `most`."""
    values = np.linspace(least, most, 30 * 30 * 3).astype(np.uint16).reshape(30, 30, 3)
    opaque = np.full((30, 30, 1), 65535, np.uint16)
    return {
        "png": png_of_16_bits(values, 2),
        "png with alpha": png_of_16_bits(np.concatenate([values, opaque], axis=2), 6),
        "png in grey with alpha": png_of_16_bits(np.concatenate([values[..., :1], opaque], axis=2), 4),
        "ppm": b"P6 30 30 65535\n" + values.astype(">u2").tobytes(),
        "tiff": tiff_of_16_bits(values, "<"),
        "big-endian tiff": tiff_of_16_bits(values, ">"),
    }


@pytest.mark.parametrize("kind", files_in_colour(0, 1))
def test_colour_of_16_bits_is_noted_where_it_is_nearly_black(kind: str) -> None:
    """Not where it uses its range: such a picture is seen as it is."""
    for most, noted in ((250, True), (4095, True), (65535, False)):
        data = files_in_colour(20, most)[kind]
        with Image.open(io.BytesIO(data)) as opened:
            for image in (read_image_bytes(data), to_rgb(opened)):
                assert (largest_of_16_bits(image) is not None) == noted
                (text,) = notes_on([facts_of(image)]) or [""]
                assert (f"The largest value is now {np.asarray(image).max()} of 255." in text) == noted
