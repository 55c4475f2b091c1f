"""Video files, read with PyAV (optional extra `video`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from sinkprune.errors import VideoError


class VideoFile:
    """The first video stream of a file. Opening it reads every packet, so that a damaged file is known at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises `VideoError`."""
        self._path = Path(path)
        if not self._path.is_file():
            raise VideoError(f"video '{path}': found no such file. Give an MP4, MKV, WebM, MOV or AVI file.")
        with self._stream() as (container, stream):
            rate = stream.average_rate or stream.guessed_rate
            self.fps = float(rate) if rate else 0.0
            packets = sum(packet.size > 0 for packet in container.demux(stream))
            # What the header promises, where it tells; a cut file has less.
            self.count = max(packets, stream.frames)

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """The frames at `indices` as RGB images.

        Every frame is decoded: one that cannot be is an error, and so is a stream that ends before all have come.
        """
        wanted, frames, count = set(indices), [], 0
        with self._stream() as (container, stream):
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise VideoError(
                        f"video '{self._path}' is broken: frame {count} is damaged. Give a complete one."
                    )
                if count in wanted:
                    frames.append(frame.to_image())
                count += 1
        if count != self.count:
            raise VideoError(
                f"video '{self._path}' is broken: {self.count} frames are in the file and {count} could be decoded. "
                "Repair it or give a complete one."
            )
        return frames

    @contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        try:
            import av
        except ImportError as error:
            raise VideoError(
                "reading video files needs the package 'av', which is not installed. Install it with: "
                "pip install 'sinkprune[video]', or give the frames as a list."
            ) from error
        try:
            with av.open(str(self._path)) as container:
                if not container.streams.video:
                    raise VideoError(f"'{self._path}' has no video in it. Give a file with a picture.")
                stream = container.streams.video[0]
                # Decoders hide damage as well as they can unless told not to.
                stream.codec_context.options = {"err_detect": "explode"}
                yield container, stream
        except (av.error.FFmpegError, EOFError) as error:
            raise VideoError(f"video '{self._path}' is broken or no video: {error}. Give a complete one.") from error
