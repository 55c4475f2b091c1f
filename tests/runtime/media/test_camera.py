"""The camera: stale frames are dropped, channels come in RGB, and its end and errors reach the reader."""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from threading import Event
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Camera, Clip, ImageError, Pipeline, UsageError
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.request import new_request

Pipelines = Callable[..., Pipeline]


def frame(number: int) -> Array:
    """A frame whose red is its number, and whose blue is 200."""
    made = np.zeros((4, 6, 3), np.uint8)
    made[..., 0], made[..., 2] = number, 200
    return made


class Source:
    """Frames when the test gives them; `handed` waits for the next call of `read`."""

    def __init__(self) -> None:
        self.waiting, self.queue = Event(), Queue[Any]()

    def read(self) -> Any:
        self.waiting.set()
        given = self.queue.get(timeout=60)
        if isinstance(given, Exception):
            raise given
        return given

    def give(self, given: Any) -> None:
        assert self.waiting.wait(60)
        self.waiting.clear()
        self.queue.put(given)

    def handed(self) -> None:
        assert self.waiting.wait(60)


def test_a_reader_gets_the_newest_frame_and_none_twice() -> None:
    source = Source()
    with Camera(source.read) as camera:
        for number in (1, 2, 3):
            source.give(frame(number))
        source.handed()
        assert (next(camera)[0, 0, 0], camera.frames, camera.dropped) == (3, 3, 2)
        source.give(frame(4))
        assert next(camera)[0, 0, 0] == 4
        source.give(None)
        assert list(camera) == []
    assert (camera.frames, camera.dropped) == (4, 2)


def test_bgr_becomes_rgb_a_buffer_may_change_and_the_last_frame_is_given_before_the_end() -> None:
    source, buffer = Source(), frame(9)[..., ::-1].copy()
    camera = Camera(source.read, order="bgr")
    source.give((True, buffer))
    source.handed()
    buffer[:] = 0
    source.give((False, None))
    camera._thread.join(60)
    (last,) = camera
    np.testing.assert_array_equal(last, frame(9))


def test_errors_of_the_source_and_other_values_reach_the_reader() -> None:
    other = r"the camera returned .*, expected a uint8 \[height,width,3\] array"
    cases: list[tuple[Any, type[Exception], str]] = [
        (OSError("unplugged"), OSError, "unplugged"),
        ((False, None), ImageError, "the camera returned no frame"),
        *((odd, ImageError, other) for odd in (frame(1).astype(np.float32), np.zeros((4, 6), np.uint8), (True, "x"))),
    ]
    for given, error, message in cases:
        source = Source()
        camera = Camera(source.read)
        source.give(given)
        with pytest.raises(error, match=message):
            next(camera)
        assert list(camera) == []


def test_a_closed_camera_ends_and_reads_no_more() -> None:
    source = Source()
    with Camera(source.read) as camera:
        source.give(frame(1))
        source.handed()
    assert list(camera) == []
    source.give(frame(2))
    camera._thread.join(60)
    assert not source.waiting.is_set()
    assert camera.frames == 1


def test_a_request_takes_bgr_arrays_and_clips_of_them(photo: Image.Image) -> None:
    rgb = np.asarray(photo)
    bgr = rgb[..., ::-1]
    given = new_request([bgr, photo, Clip([bgr, photo], 2.0)], "Why?", order="bgr").pictures
    np.testing.assert_array_equal(given[0], rgb)
    assert given[1] is photo
    assert isinstance(given[2], Clip)
    np.testing.assert_array_equal(given[2].frames[0], rgb)
    for call in (lambda: Camera(lambda: None, order="gbr"), lambda: new_request("a.jpg", "Why?", order="gbr")):
        with pytest.raises(UsageError, match=r"order is 'gbr', expected 'rgb' or 'bgr'"):
            call()
