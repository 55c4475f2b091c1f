"""Pictures in messages, which the library rosbags writes."""

from __future__ import annotations

import re
import struct
import tracemalloc
from typing import Any

import lz4.frame
import numpy as np
import pytest
import zstandard
from PIL import Image

from sinkprune.contract.errors import ImageError
from sinkprune.jetson.bags.bag import read_frame
from sinkprune.runtime.media.images import largest_of_16_bits
from support.models.bags import COMPRESSED, IMAGE, START_NS, compressed_image, raw_image, typestore

HEIGHT, WIDTH = 5, 7
RGB = np.random.default_rng(3).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
ALPHA = np.full((HEIGHT, WIDTH, 1), 9, np.uint8)
DEEP = np.random.default_rng(4).integers(0, 65536, (HEIGHT, WIDTH), np.uint16)


def data_of(message: Any, little_endian: bool = True) -> bytes:
    return bytes(typestore().serialize_cdr(message, message.__msgtype__, little_endian=little_endian))


def pixels(message: Any, little_endian: bool = True) -> np.ndarray[Any, Any]:
    frame = read_frame(message.__msgtype__, data_of(message, little_endian))
    assert frame.picture.mode == "RGB" and frame.frame_id == "camera"
    assert frame.seconds * 10**9 + frame.nanoseconds == START_NS - 5_000_000
    return np.asarray(frame.picture)


@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize(
    ("encoding", "given", "expected"),
    [
        ("rgb8", RGB, RGB),
        ("bgr8", RGB[..., ::-1], RGB),
        ("rgba8", np.concatenate([RGB, ALPHA], 2), RGB),
        ("bgra8", np.concatenate([RGB[..., ::-1], ALPHA], 2), RGB),
        ("mono8", RGB[..., 0], np.repeat(RGB[..., :1], 3, 2)),
        # What cv_bridge writes of a grey array without a name of an encoding
        ("8UC1", RGB[..., 0], np.repeat(RGB[..., :1], 3, 2)),
    ],
)
def test_every_encoding_has_its_pixels(encoding: str, given: Any, expected: Any, little_endian: bool) -> None:
    assert np.array_equal(pixels(raw_image(given, encoding), little_endian), expected)


@pytest.mark.parametrize("encoding", ["mono16", "16UC1"])
@pytest.mark.parametrize("big", [False, True])
def test_16_bits_are_divided_by_257_in_either_order_of_bytes(encoding: str, big: bool) -> None:
    message = raw_image(DEEP.astype(">u2" if big else "<u2"), encoding, is_bigendian=int(big))
    expected = np.repeat(((DEEP.astype(np.uint32) + 128) // 257)[..., None], 3, 2)
    assert np.array_equal(pixels(message), expected)
    assert largest_of_16_bits(read_frame(IMAGE, data_of(message)).picture) is not None


@pytest.mark.parametrize(("encoding", "given"), [("bgr8", RGB[..., ::-1]), ("mono16", DEEP)])
def test_padding_at_the_end_of_rows_is_left_out(encoding: str, given: np.ndarray[Any, Any]) -> None:
    rows = np.ascontiguousarray(given).view(np.uint8).reshape(HEIGHT, -1)
    padded = np.pad(rows, ((0, 0), (0, 5)), constant_values=77)
    message = raw_image(given, encoding, step=padded.shape[1], data=padded.ravel())
    assert np.array_equal(pixels(message), pixels(raw_image(given, encoding)))


def test_compressed_pictures(photo: Image.Image) -> None:
    small = photo.resize((64, 48))
    assert np.array_equal(pixels(compressed_image(small, "png")), np.asarray(small))
    assert np.array_equal(pixels(compressed_image(small, "png", name="png"), False), np.asarray(small))
    assert np.abs(pixels(compressed_image(small)).astype(int) - np.asarray(small)).mean() < 8


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (raw_image(RGB, "bayer_rggb8"), "the encoding is 'bayer_rggb8', expected one of rgb8, bgr8"),
        (raw_image(RGB, "rgb8", width=0), "0x5 pixels"),
        (raw_image(RGB, "rgb8", step=20), "rows of 20 bytes and 105 bytes in all, expected rows of 21 or more"),
        (raw_image(RGB, "rgb8", height=6), "7x6 pixels in rgb8, rows of 21 bytes and 105 bytes"),
        (raw_image(RGB, "rgb8", height=1_000_000_000), "7x1000000000 pixels, expected 1 to 67108864"),
        (raw_image(RGB, "rgb8", height=4), "105 bytes in all"),
        (raw_image(RGB, "x" * 1000), "has a text of 1001 bytes, expected at most 1000"),
        (compressed_image(Image.new("RGB", (4, 4)), "png", name="16UC1; compressedDepth png"), "compressedDepth"),
    ],
)
def test_a_wrong_picture_is_rejected(message: Any, said: str) -> None:
    data = data_of(message)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=re.escape(said)):
            read_frame(message.__msgtype__, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_message_that_is_cut_off_or_no_cdr_is_rejected() -> None:
    whole = data_of(raw_image(RGB, "rgb8"))
    for length in range(len(whole)):
        with pytest.raises(ImageError, match=r"is cut off|is neither CDR"):
            read_frame(IMAGE, whole[:length])
    for head in (b"\0\2\0\0", b"\1\1\0\0"):
        with pytest.raises(ImageError, match="is neither CDR nor compressed"):
            read_frame(IMAGE, head + whole[4:])
    for damaged in (zstandard.compress(whole)[:-9], lz4.frame.compress(whole)[:-9], zstandard.compress(b"")):
        with pytest.raises(ImageError, match=r"the message is damaged|is neither CDR"):
            read_frame(IMAGE, damaged)
    # The length of the data says 4 GB.
    place = whole.rindex(struct.pack("<I", 105))
    with pytest.raises(ImageError, match="a field has 4294967295 bytes, and 105 are left"):
        read_frame(IMAGE, whole[:place] + b"\xff\xff\xff\xff" + whole[place + 4 :])
    jpeg = data_of(compressed_image(Image.new("RGB", (64, 64))))
    with pytest.raises(ImageError, match="is cut off"):
        read_frame(COMPRESSED, jpeg[:-40])
