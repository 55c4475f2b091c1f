"""A camera with its own rate: a slow reader gets its newest frame."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from sinkprune.contract.checks import check_callable, checks_options, format_value
from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.channel_order import check_order, in_rgb

Read = Callable[[], Array | tuple[bool, Array | None] | None]
"""Waits for the next frame and returns a uint8 [height,width,3] array, alone or after a flag; None at the end."""


class Camera(Iterator[Array], AbstractContextManager["Camera"]):
    """Iterator over the newest frames of a source, for readers that are slower; stale frames are dropped.

        with Camera(cv2.VideoCapture(0).read, order="bgr") as camera:
            for frame in camera:
                answer = pipeline.generate(frame, "Is the way clear?", deadline_ms=300, max_new_tokens=8)

    A thread calls `read` repeatedly and keeps the last frame only. `read` takes no arguments and waits for the next
    frame. It returns a uint8 [height,width,3] array, or a flag and such an array, as in OpenCV. None or a false flag
    ends the stream; OpenCV's flag is false also if a camera is lost. `order` is the order of its channels, "rgb" or
    "bgr". Iteration yields RGB arrays, each frame at most once, and waits for a frame newer than the last. It raises
    the errors of `read`, and `ImageError` for other values than frames and for a first flag that is false. `frames`
    counts what was read, and `dropped` what a newer frame replaced. Creation raises `TypeError` and `UsageError`.
    """

    @checks_options
    def __init__(self, read: Read, *, order: str = "rgb") -> None:
        """Start to read at once, until `close` or the end of the `with` block."""
        check_callable("read", read)
        self._read, self._order = read, check_order(order)
        self._changed = threading.Condition()
        self._frame: Array | None = None
        self._error: BaseException | None = None
        self._ended = False
        self.frames = 0
        """The number of frames that were read."""
        self.dropped = 0
        """The number of frames that a newer one replaced before the reader took them."""
        self._thread = threading.Thread(target=self._run, name="sinkprune camera", daemon=True)
        self._thread.start()

    def __next__(self) -> Array:
        """Return the newest frame that was not taken, as uint8 [height,width,3] in RGB; waits for one."""
        with self._changed:
            while self._frame is None and not self._ended:
                self._changed.wait()
            frame, self._frame = self._frame, None
            if frame is not None:
                return frame
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        raise StopIteration

    def close(self) -> None:
        """End reading and the iteration. A running call of `read` goes on until it returns."""
        with self._changed:
            self._ended, self._frame = True, None
            self._changed.notify_all()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._ended:
                read = self._read()
                frame = _checked_frame(read)
                if frame is None:
                    if read is not None and not self.frames:
                        raise ImageError("the camera returned no frame. Check that it is connected and open.")
                    break
                with self._changed:
                    if self._ended:
                        break
                    self.frames += 1
                    self.dropped += self._frame is not None
                    # A copy, because drivers reuse their buffers.
                    self._frame = in_rgb(frame, self._order).copy()
                    self._changed.notify_all()
        except BaseException as error:
            # The reader's next call raises it.
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _checked_frame(read: object) -> Array | None:
    """Return the frame in a result of `read`, None at the end; raises `ImageError` for other values."""
    if isinstance(read, tuple) and len(read) == 2:
        read = read[1] if read[0] else None
    if read is None:
        return None
    if not isinstance(read, np.ndarray) or read.dtype != np.uint8 or read.ndim != 3 or read.shape[2] != 3:
        found = f"{read.dtype}{list(read.shape)}" if isinstance(read, np.ndarray) else format_value(read)
        raise ImageError(f"the camera returned {found}, expected a uint8 [height,width,3] array.")
    return read
