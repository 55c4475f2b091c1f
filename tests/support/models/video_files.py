"""Video files of every kind that PyAV can write."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


def write_video(
    path: Path,
    pictures: Sequence[Image.Image],
    fps: int = 10,
    *,
    codec: str = "mpeg4",
    lengths: Sequence[int] = (),
    audio_seconds: float = 0,
    flags: Mapping[str, str] | None = None,
    coding: Mapping[str, str] | None = None,
) -> Path:
    """The pictures in a file; each `lengths` long, in turns and in frames of `fps`, where they are given.

    `flags` are the container's options, `coding` the codec's.
    """
    av: Any = pytest.importorskip("av")
    with scheduled_as_before(), av.open(str(path), "w", options=dict(flags or {})) as container:
        stream = container.add_stream(codec, rate=fps, options=dict(coding or {}))
        stream.width, stream.height = pictures[0].size
        stream.pix_fmt, stream.bit_rate = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p"), 4_000_000
        place, sound = 0, None
        if audio_seconds:
            sound = container.add_stream("libopus" if path.suffix == ".webm" else "aac", rate=48000)
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_image(picture)
            if lengths:
                frame.pts, frame.time_base = place, Fraction(1, fps)
                place += lengths[number % len(lengths)]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if sound:
            for start in range(0, int(audio_seconds * 48000), 1024):
                frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
                container.mux(sound.encode(frame))
            container.mux(sound.encode(None))
    return path


@contextmanager
def scheduled_as_before() -> Iterator[None]:
    """Give the thread its scheduling policy back after the block.

    SVT-AV1 gives the thread that calls it, and so all its later children, real-time priority where root runs it: they
    starve everything else on their core, and may wait there for good for what they starve.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def trimmed(path: Path, start: float, seconds: float) -> Path:
    """Rewrite the edit list of an MP4 file, as trims without encoding leave it: all frames there, some shown."""
    data = bytearray(path.read_bytes())
    scale = struct.unpack_from(">I", data, data.index(b"mdhd") + 16)[0]
    edit = data.index(b"elst") + 12
    first = struct.unpack_from(">i", data, edit + 4)[0]
    struct.pack_into(">Ii", data, edit, int(seconds * 1000), first + int(start * scale))
    path.write_bytes(data)
    return path


def turned(path: Path, matrix: Sequence[float]) -> Path:
    """Rewrite the display matrix of an MP4 file of one stream, which phones write to turn it: its a, b, c and d."""
    data = bytearray(path.read_bytes())
    place = data.index(b"tkhd") + 44
    assert struct.unpack_from(">9i", data, place) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    a, b, c, d = (int(number * (1 << 16)) for number in matrix)
    struct.pack_into(">9i", data, place, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path
