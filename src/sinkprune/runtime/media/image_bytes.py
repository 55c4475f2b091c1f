"""Pictures that clients of a server send: the bytes of image files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

from PIL import Image

from sinkprune.runtime.media.frame import UnopenedPicture
from sinkprune.runtime.media.images import count_pixels, read_image_bytes


class ImageBytes(UnopenedPicture):
    """The bytes of an image file that is decoded later. Its header is read at once."""

    pixels: int
    """The number of pixels, by the header. Those of a WebP file count twice, because they take twice the memory."""

    def __init__(self, data: bytes, name: str) -> None:
        """Raises `ImageError`, without `name`, for no known format, and beyond the limits of `read_image`."""
        self._data, self.name, self.pixels = data, name, count_pixels(data)
        self._cancelled = Event()

    def decoded(self) -> Image.Image:
        """Return the RGB image, as `read_image` does; raises `ImageError`, also soon after `cancel`."""
        return read_image_bytes(self._data, self._cancelled)

    @contextmanager
    def opened(self) -> Iterator[Image.Image]:
        yield self.decoded()

    def cancel(self) -> None:
        """End `decoded`, because nobody needs the image; any thread may call this."""
        self._cancelled.set()
