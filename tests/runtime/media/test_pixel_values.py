"""Pixels of every kind of file and Pillow image equal plain numpy; what Pillow misreads is refused by name."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.media.images import facts_of, largest_of_16_bits, read_image_bytes, to_rgb
from sinkprune.runtime.media.picture_warnings import notes_on

Reader = Callable[[bytes], Image.Image]
GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6
"""Kinds of PNG, by their number in the header."""
WHITE_IS_ZERO, BLACK_IS_ZERO = 0, 1


def packed(values: Array, bits: int) -> bytes:
    """Return rows of values, each row filled up to whole bytes, the first value in the highest bits."""
    digits = values.reshape(len(values), -1, 1) >> np.arange(bits)[::-1] & 1
    return np.packbits(digits.reshape(len(values), -1).astype(np.uint8), axis=1).tobytes()


def png(values: Array, bits: int, kind: int, **chunks: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], bits, kind, 0, 0, 0)
    rows = b"".join(b"\0" + packed(row[None], bits) for row in values)
    further = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    pixels = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + further + pixels


def tiff(values: Array, bits: int, order: str, tags: Mapping[int, int], compress: bool = False) -> bytes:
    """Return a TIFF of one strip; `order` is "<" or ">", and `tags` are numbers of its directory."""
    data = values.astype(f"{order}u2").tobytes() if bits == 16 else packed(values, bits)
    data = zlib.compress(data) if compress else data
    height, width = values.shape[:2]
    channels = values.shape[2] if values.ndim == 3 else 1
    known = {256: width, 257: height, 258: bits, 259: 8 if compress else 1, 273: 8, 277: channels, 279: len(data)}
    entries = sorted({**known, 278: height, **tags}.items())
    # A short of the directory stands in the first bytes of its field.
    directory = b"".join(struct.pack(f"{order}HHIHH", tag, 3, 1, number, 0) for tag, number in entries)
    directory = struct.pack(f"{order}H", len(entries)) + directory
    start = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, 8 + len(data))
    return start + data + directory + bytes(4)


def over_white(colours: Array, alpha: Array) -> Array:
    """Return [height,width,3] of colours of 0 to 255 and an alpha of 0 to 1, [height,width,1]."""
    return np.broadcast_to(np.round(colours * alpha + 255 * (1 - alpha)), (*alpha.shape[:2], 3))


def assert_equals(found: Image.Image, expected: Array, tolerance: int = 0) -> None:
    difference = np.abs(np.asarray(found, int) - np.broadcast_to(expected, (*expected.shape[:2], 3)))
    assert difference.max() <= tolerance


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def opened(data: bytes) -> Image.Image:
    """The image of a file that the user opened."""
    return to_rgb(Image.open(io.BytesIO(data)))


READERS = (read_image_bytes, opened)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("read", READERS)
def test_the_transparent_grey_of_a_png_is_white(read: Reader, bits: int, random: np.random.Generator) -> None:
    values = random.integers(0, 1 << bits, (6, 7))
    for transparent in {0, 1, int(values[2, 3]), (1 << bits) - 2}:
        data = png(values, bits, GREY, tRNS=struct.pack(">H", transparent))
        grey = np.where(values == transparent, 255, np.round(values * 255 / ((1 << bits) - 1)))
        assert_equals(read(data), grey[..., None])


@pytest.mark.parametrize("read", READERS)
def test_the_transparent_colour_of_a_png_is_white_and_of_16_bits_refused(
    read: Reader, random: np.random.Generator
) -> None:
    values = random.integers(0, 256, (6, 7, 3))
    transparent = values[2, 3]
    values[0, 0], values[5, 6] = transparent ^ 1, transparent
    expected = np.where((values != transparent).any(axis=2, keepdims=True), values, 255)
    key = struct.pack(">HHH", *transparent)
    assert_equals(read(png(values, 8, COLOUR, tRNS=key)), expected)
    # Also where all its values fit in 8 bits
    with pytest.raises(ImageError, match="transparent colour of 16 bits a channel"):
        read(png(values, 16, COLOUR, tRNS=key))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_palette_with_alphas(bits: int, random: np.random.Generator) -> None:
    values, colours = (
        random.integers(0, 256 if three else 1 << bits, (1 << bits, 3) if three else (6, 7)) for three in (0, 1)
    )
    for alphas in (random.integers(0, 256, 1 << bits), np.array([255] * ((1 << bits) - 1) + [0])):
        data = png(values, bits, PALETTE, PLTE=bytes(colours.ravel().tolist()), tRNS=bytes(alphas.tolist()))
        assert_equals(read_image_bytes(data), over_white(colours[values], alphas[values][..., None] / 255), 1)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("kind", "channels"), [(GREY_ALPHA, 1), (COLOUR_ALPHA, 3)])
def test_a_png_with_alpha(kind: int, channels: int, bits: int, random: np.random.Generator) -> None:
    values = random.integers(0, 1 << bits, (6, 7, channels + 1))
    expected = over_white(values[..., :-1] >> (bits - 8), values[..., -1:] / ((1 << bits) - 1))
    assert_equals(read_image_bytes(png(values, bits, kind)), expected, 1)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compress", [False, True], ids=["raw", "compressed"])
@pytest.mark.parametrize(
    ("bits", "photometric"),
    [(bits, meaning) for bits in (1, 2, 4, 8, 12, 16) for meaning in (WHITE_IS_ZERO, BLACK_IS_ZERO)],
)
def test_grey_of_a_tiff(bits: int, photometric: int, compress: bool, order: str, random: np.random.Generator) -> None:
    values = random.integers(0, 1 << bits, (6, 8))
    data = tiff(values, bits, order, {262: photometric}, compress)
    if bits > 8 and order + str(bits) + str(photometric) in (">160", ">120", ">121", "<120"):
        # Pillow knows none of these.
        with pytest.raises(ImageError, match="has no known format"):
            read_image_bytes(data)
        return
    grey = np.round(values * 255 / ((1 << bits) - 1))
    expected = (255 - grey if photometric == WHITE_IS_ZERO else grey)[..., None]
    for read in READERS:
        assert_equals(read(data), expected, bits > 8)


def test_values_of_a_tiff_that_pillow_misreads_are_refused(random: np.random.Generator) -> None:
    signed = tiff(random.integers(0, 256, (6, 8)), 8, "<", {262: BLACK_IS_ZERO, 339: 2})
    refused = [(signed, "has signed values of 8 bits, expected unsigned")]
    for bits, tags in ((16, {262: BLACK_IS_ZERO}), (8, {262: WHITE_IS_ZERO}), (4, {262: 1}), (8, {262: 1, 266: 2})):
        planes = tiff(random.integers(0, 1 << bits, (6, 8)), bits, "<", {**tags, 284: 2})
        refused.append((planes, f"has values of {bits} bits in separate planes without compression"))
    for data, message in refused:
        for read in READERS:
            with pytest.raises(ImageError, match=message):
                read(data)
    values = random.integers(0, 256, (6, 8))
    assert_equals(read_image_bytes(tiff(values, 8, "<", {262: BLACK_IS_ZERO, 284: 2})), values[..., None])


@pytest.mark.parametrize("mode", ["LA", "La", "RGBA", "RGBa", "PA"])
def test_pillow_images_with_alpha(mode: str, random: np.random.Generator) -> None:
    given = Image.fromarray(random.integers(0, 256, (6, 7, 4), dtype=np.uint8))
    alpha = np.asarray(given.getchannel("A"), float)[..., None] / 255
    colours = given.convert("RGB").convert("P" if mode == "PA" else "L" if mode[0] == "L" else "RGB")
    image = colours.copy()
    image.putalpha(given.getchannel("A"))
    image = image.convert(mode) if mode in ("La", "RGBa") else image
    assert image.mode == mode
    assert_equals(to_rgb(image), over_white(np.asarray(colours.convert("RGB"), float), alpha), 2)


@pytest.mark.parametrize("kind", ["png", "png in grey with alpha", "ppm", "tiff"])
def test_colour_of_16_bits_is_noted_where_it_is_nearly_black(kind: str) -> None:
    """Not where it uses its range: such a picture is seen as it is."""
    for most, noted in ((250, True), (4095, True), (65535, False)):
        values = np.linspace(20, most, 30 * 30 * 3).astype(np.uint16).reshape(30, 30, 3)
        grey = np.stack([values[..., 0], np.full((30, 30), 65535, np.uint16)], axis=2)
        data = {
            "png": png(values, 16, COLOUR),
            "png in grey with alpha": png(grey, 16, GREY_ALPHA),
            "ppm": b"P6 30 30 65535\n" + values.astype(">u2").tobytes(),
            "tiff": tiff(values, 16, ">", {262: 2}),
        }[kind]
        for read in READERS:
            image = read(data)
            assert (largest_of_16_bits(image) is not None) == noted
            (text,) = notes_on([facts_of(image)]) or [""]
            assert (f"The largest value is now {np.asarray(image).max()} of 255." in text) == noted
