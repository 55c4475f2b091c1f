"""A camera that delivers frames at its own rate, of which a slow reader gets the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from sinkprune.contract.checks.arguments import check_callable
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import ImageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.pictures import check_order, in_rgb

Read = Callable[[], Array | tuple[bool, Array | None] | None]
"""Waits for the next frame and returns it: a uint8 [height,width,3] array, or a flag with one; None at the end."""


class Camera:
    """The newest frame of a source, for readers that take longer than a frame; stale frames are dropped.

        with Camera(cv2.VideoCapture(0).read, order="bgr") as camera:
            for frame in camera:
                answer = pipeline.generate(frame, "Is the way clear?", deadline_ms=300)

    A thread calls `read` again and again and keeps the last frame only. `read` is a function without arguments that
    waits for the next frame: it returns a uint8 [height,width,3] array, or as OpenCV's does a flag and such an array;
    None or a false flag is the end. `order` says whether its arrays are "rgb" or "bgr". Iteration yields RGB arrays,
    each frame at most once, and waits for a frame that is newer than the last. It raises what `read` raised, and
    `ImageError` for what is no frame and for a source that has none. Creation raises `TypeError` and `UsageError`.
    """

    def __init__(self, read: Read, *, order: str = "rgb") -> None:
        """Start to read at once. `close`, or the end of the `with` block, ends it."""
        check_callable("read", read)
        self._read, self._order = read, check_order(order)
        self._changed = threading.Condition()
        self._frame: Array | None = None
        self._error: BaseException | None = None
        self._ended = False
        self.frames = 0
        """How many frames came."""
        self.dropped = 0
        """How many of them a newer one replaced before they were taken."""
        self._thread = threading.Thread(target=self._run, name="sinkprune camera", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Array]:
        """The camera itself."""
        return self

    def __next__(self) -> Array:
        """Return the newest frame that was not taken yet, as uint8 [height,width,3] in RGB; waits for one."""
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
        """Have no more frames read, and end the iteration; a `read` that is under way goes on until it returns."""
        with self._changed:
            self._ended, self._frame = True, None
            self._changed.notify_all()

    def __enter__(self) -> Camera:
        """The camera itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _run(self) -> None:
        try:
            while not self._ended:
                frame = _frame_of(self._read())
                if frame is None:
                    if not self.frames:
                        raise ImageError("the camera gave no frame. Check that it is connected and open.")
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
            # Raised again where frames are taken.
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _frame_of(read: object) -> Array | None:
    """What a source gave as a frame; None at its end. Raises `ImageError`."""
    if isinstance(read, tuple) and len(read) == 2:
        read = read[1] if read[0] else None
    if read is None:
        return None
    if not isinstance(read, np.ndarray) or read.dtype != np.uint8 or read.ndim != 3 or read.shape[2] != 3:
        found = f"{read.dtype}{list(read.shape)}" if isinstance(read, np.ndarray) else format_value(read)
        raise ImageError(f"the camera gave {found}, expected a uint8 [height,width,3] array.")
    return read
