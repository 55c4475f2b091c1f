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

    def __init__(self, container: str) -> None:
        """Start an empty index. `container` is FFmpeg's name of the file's kind."""
        self._known = container in _CONTAINERS
        self._times: list[int] = []
        self._keys: set[int] = set()

    def add(self, packet: Any) -> None:
        """Record the next packet of the stream, in the order of the file."""
        if packet.pts is None:
            self._known = False
            return
        if packet.is_keyframe:
            self._keys.add(packet.pts)
        if not packet.is_discard:
            self._times.append(packet.pts)

    def close(self) -> None:
        """Sort the times after the last packet."""
        self._times.sort()
        self._known = self._known and len(set(self._times)) == len(self._times) and len(self._keys) > 1
        self._sorted_keys = sorted(self._keys)

    @property
    def can_seek(self) -> bool:
        """Whether a frame can be found by its time, without decoding all frames before it."""
        return self._known

    def frames(self, container: Any, stream: Any, wanted: Collection[int]) -> Iterator[Any]:
        """Yield the frames with the numbers `wanted`, ascending, each decoded from the keyframe before it.

        Raises `LostFrameError` if the file has something else in their place.
        """
        times = sorted(self._times[number] for number in wanted)
        for place, group in groupby(times, lambda time: bisect_right(self._sorted_keys, time) - 1):
            if place < 0:
                raise LostFrameError
            yield from self._decode_group(container, stream, self._sorted_keys[place], list(group))

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
