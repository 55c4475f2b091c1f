"""Video files, read with PyAV (optional extra `video`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from sinkprune.contract.arguments import check_path
from sinkprune.contract.errors import VideoError
from sinkprune.runtime.block_chain import gif_is_whole, matroska_is_whole

# What decoders check; more than that, and they refuse what sloppy encoders write.
_CHECKS = "crccheck+bitstream+buffer+explode"
_WALKS: dict[str, Callable[[Path], bool]] = {"gif": gif_is_whole, "matroska,webm": matroska_is_whole}


class VideoFile:
    """The first video stream of a file.

    A file that is cut off or damaged is refused, as far as that can be known. Opening reads every packet and compares
    with the length in the header (MP4, AVI, WMV, FLV) or follows the blocks to the end (MKV, WebM, GIF); reading
    decodes every frame. What cannot be known: where an MPEG stream (TS, PS) should end, or an MKV or MP4 that was
    recorded live, whose header says no length; frames lost from the middle of an AVI or WMV file; and damage within
    a frame that its codec can decode to something, as VP8, VP9, HEVC and GIF often can.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file and reads all its packets; raises `VideoError` if it is missing, cut off or no video, and
        `TypeError` for what is no path."""
        check_path("path", path)
        self._path = Path(path)
        if not self._path.is_file():
            raise VideoError(f"video '{path}': found no such file. Give an MP4, MKV, WebM, MOV or AVI file.")
        with self._stream() as (container, stream):
            rate = stream.average_rate or stream.guessed_rate
            self.fps = float(rate) if rate else 0.0
            # Frames before and behind what an edit list shows are decoded and not shown.
            self.count, end, end_of_all = 0, 0.0, 0.0
            for packet in container.demux():
                if packet.is_corrupt and packet.stream is stream:
                    raise self._broken(f"frame {self.count} is damaged")
                if packet.pts is not None:
                    until = float((packet.pts + (packet.duration or 0)) * packet.time_base)
                    end_of_all = max(end_of_all, until)
                    end = max(end, until) if packet.stream is stream else end
                self.count += packet.stream is stream and packet.size > 0 and not packet.is_discard
            self._check_end(container, stream, end, end_of_all)
        if not self.count:
            raise VideoError(f"video '{path}' has no frames. Give one with a picture in it.")

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """The frames at `indices` as RGB images.

        Every frame is decoded: one that cannot be is an error, and so is a stream that ends before all have come.
        """
        wanted, frames, count = set(indices), [], 0
        with self._stream() as (container, stream):
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise self._broken(f"frame {count} is damaged")
                if count in wanted:
                    frames.append(frame.to_image())
                count += 1
        if count != self.count:
            raise self._broken(f"{self.count} frames are in the file and {count} could be decoded")
        return frames

    def _check_end(self, container: Any, stream: Any, end: float, end_of_all: float) -> None:
        """Compare where the packets end, in seconds, with what the header says."""
        kind, said = container.format.name, 0.0
        if kind in _WALKS and not _WALKS[kind](self._path):
            raise self._broken("it ends too early, or blocks are missing in it")
        if kind.startswith("mov,") and stream.duration:
            said = float(stream.duration * stream.time_base)
        elif kind == "avi" and self.fps:
            # Frames that repeat the one before are counted and have no packet.
            said = stream.frames / self.fps
        elif kind in ("flv", "asf"):
            # The longest stream's. The reader of ASF (WMV) leaves it out where the file's size is not the header's.
            if container.duration is None:
                raise self._broken("its size is not what its header says")
            end, said = end_of_all, container.duration / 1e6
        if self.fps and said - end > 2.5 / self.fps:
            raise self._broken(f"its header says {said:.2f} seconds and it ends after {end:.2f}")

    def _broken(self, what: str) -> VideoError:
        return VideoError(f"video '{self._path}' is broken: {what}. Repair it or give a complete one.")

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
                if stream.codec_context is None:
                    raise VideoError(
                        f"video '{self._path}' is of a codec that PyAV does not know. Convert it to H.264."
                    )
                stream.codec_context.options = {"err_detect": _CHECKS}
                yield container, stream
        except (av.error.FFmpegError, EOFError) as error:
            reason = "it ends before any frame" if isinstance(error, EOFError) else error.strerror
            raise VideoError(f"video '{self._path}' is broken or no video: {reason}. Give a complete one.") from error
