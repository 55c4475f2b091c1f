"""The pictures in messages of the types sensor_msgs/msg/Image and sensor_msgs/msg/CompressedImage."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from PIL import Image

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import ImageError
from sinkprune.contract.files.untrusted import UnreadableError
from sinkprune.jetson.bags.bag_file import DamagedError
from sinkprune.jetson.bags.cdr import CdrReader
from sinkprune.jetson.bags.mcap_file import decompressed
from sinkprune.runtime.media.images import MOST_PIXELS, read_image_bytes, to_rgb


class Encoding(NamedTuple):
    """How the bytes of an Image become a Pillow image. Camera drivers leave alpha unset, so it is dropped."""

    mode: str
    """Pillow's mode of the picture."""
    little: str
    """Pillow's name of the layout of its bytes."""
    big: str
    """The same for big-endian numbers."""
    pixel_bytes: int


_8_BITS = Encoding("L", "L", "L", 1)
_16_BITS = Encoding("I;16", "I;16", "I;16B", 2)
ENCODINGS = {
    "rgb8": Encoding("RGB", "RGB", "RGB", 3),
    "bgr8": Encoding("RGB", "BGR", "BGR", 3),
    "rgba8": Encoding("RGB", "RGBX", "RGBX", 4),
    "bgra8": Encoding("RGB", "BGRX", "BGRX", 4),
    "mono8": _8_BITS,
    "8UC1": _8_BITS,
    "mono16": _16_BITS,
    "16UC1": _16_BITS,
}
"""The encodings that are read, by their name in `Image.encoding`."""


class Frame(NamedTuple):
    """A picture of a topic, with the header of its message."""

    seconds: int
    nanoseconds: int
    """The time in the header, which a camera sets when it takes the picture."""
    frame_id: str
    """The coordinate frame of the camera."""
    picture: Image.Image
    """The picture in RGB. Values of 16 bits are scaled to 8 bits."""


def read_frame(type_name: str, data: bytes) -> Frame:
    """Return the picture in a message of one of `IMAGE_TYPES`, which may be compressed; raises `ImageError`."""
    try:
        # Recorders compress messages one by one, which only the metadata of a whole bag states.
        fields = CdrReader(decompressed(data))
        return Frame(fields.u32(), fields.u32(), fields.text(), IMAGE_TYPES[type_name](fields))
    except (UnreadableError, DamagedError) as error:
        raise ImageError(f"the message {error}") from error


def _image(fields: CdrReader) -> Image.Image:
    height, width, name, big = fields.u32(), fields.u32(), fields.text(), bool(fields.u8())
    step, data = fields.u32(), fields.data()
    encoding = ENCODINGS.get(name)
    if encoding is None:
        raise ImageError(f"the encoding is {format_value(name)}, expected one of {', '.join(ENCODINGS)}")
    if not 0 < width * height <= MOST_PIXELS:
        raise ImageError(f"the picture has {width}x{height} pixels, expected 1 to {MOST_PIXELS} in all")
    if step < width * encoding.pixel_bytes or len(data) != step * height:
        raise ImageError(
            f"the picture has {width}x{height} pixels in {name}, rows of {step} bytes and {len(data)} bytes in all, "
            f"expected rows of {width * encoding.pixel_bytes} or more, and as many bytes as all rows have"
        )
    layout = encoding.big if big else encoding.little
    return to_rgb(Image.frombytes(encoding.mode, (width, height), data, "raw", layout, step))


def _compressed_image(fields: CdrReader) -> Image.Image:
    name, data = fields.text(), bytes(fields.data())
    if "compressedDepth" in name:
        raise ImageError(f"the format is {format_value(name)}, expected JPEG or PNG")
    return read_image_bytes(data)


IMAGE_TYPES: dict[str, Callable[[CdrReader], Image.Image]] = {
    "sensor_msgs/msg/Image": _image,
    "sensor_msgs/msg/CompressedImage": _compressed_image,
}
"""The types that are read, each with the function that reads the fields after the header."""
