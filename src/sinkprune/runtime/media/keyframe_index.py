"""An index of a video's frames by time, and of the keyframes where decoding can start."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

# Packets of these containers have the time of their frame, and headers list the keyframes.
_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")


class LostFrameError(Exception):
    """A frame was not where the index has it."""


class KeyframeIndex:
    """The times of a video stream's frames, and its packets that can be decoded without earlier ones."""

    def __init__(self, container: str, times: Collection[int | None], keys: Collection[int | None]) -> None:
        """Sort the times of all frames and of the keyframes. `container` is FFmpeg's name of the file's kind."""
        self._times = sorted(time for time in times if time is not None)
        self._keys = sorted(time for time in keys if time is not None)
        self.can_seek = (
            container in _CONTAINERS and len({*self._times}) == len(times) and 1 < len(self._keys) == len(keys)
        )
        """Whether a frame can be found by its time, without decoding all frames before it."""

    def frames(self, container: Any, stream: Any, wanted: Collection[int]) -> Iterator[Any]:
        """Yield the frames with the numbers `wanted`, ascending, each decoded from the keyframe before it.

        Raises `LostFrameError` if the file has something else in their place.
        """
        times = sorted(self._times[number] for number in wanted)
        for place, group in groupby(times, lambda time: bisect_right(self._keys, time) - 1):
            if place < 0:
                raise LostFrameError
            yield from self._decode_group(container, stream, self._keys[place], list(group))

    def _decode_group(self, container: Any, stream: Any, key: int, times: list[int]) -> Iterator[Any]:
        container.seek(key, stream=stream, backward=True)
        left, start = iter(times), None
        time = next(left)
        for packet in container.demux(stream):
            if start is None:
                if packet.pts not in self._keys or packet.pts > key:
                    raise LostFrameError
                start = packet.pts
            for frame in packet.decode():
                # Frames that are shown before the keyframe may need frames that were not decoded.
                if frame.pts is None or (frame.pts > time and frame.pts >= start):
                    raise LostFrameError
                if frame.pts == time:
                    if frame.is_corrupt:
                        raise LostFrameError
                    yield frame
                    following = next(left, None)
                    if following is None:
                        return
                    time = following
        raise LostFrameError
