"""Video files, read with PyAV (optional extra `video`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from sinkprune.contract.checks.arguments import check_path
from sinkprune.contract.errors import VideoError
from sinkprune.contract.files.untrusted import MissingError, UnreadableError, open_regular
from sinkprune.runtime.media.block_chain import gif_is_whole, matroska_is_whole
from sinkprune.runtime.media.clip import collected
from sinkprune.runtime.media.display_matrix import turned
from sinkprune.runtime.media.keyframe_index import KeyframeIndex, LostFrameError

CONTAINERS = ("mov", "matroska", "avi", "gif", "mpegts", "mpeg", "flv", "asf")
"""What a video file may be, by FFmpeg's names; `mov` is MP4 too, `matroska` WebM, `asf` WMV. None names other files:
playlists do, and have them opened."""
MOST_FRAME_PIXELS = 1 << 24
"""The most pixels a frame of a video file may have: 4096x4096. Decoders hold several at a time."""
MOST_FRAMES = 1 << 18
"""The most frames a video file may have: two hours at 30 a second."""
MOST_PACKETS = 4 * MOST_FRAMES
"""The most packets a video file may have, those of its sound among them."""

# What decoders check; more than that, and they refuse what sloppy encoders write.
_CHECKS = "crccheck+bitstream+buffer+explode"
_OPTIONS = {
    "format_whitelist": ",".join(CONTAINERS),
    # No file is opened but the one that was given.
    "protocol_whitelist": "none",
    # Of a frame as it is coded, which is a little larger than what is shown of it.
    "max_pixels": str(MOST_FRAME_PIXELS * 9 // 8),
}
_GIVE = "Give a complete MP4, MOV, MKV, WebM, AVI, GIF, MPEG, FLV or WMV file."
_WALKS: dict[str, Callable[[BinaryIO], bool]] = {"gif": gif_is_whole, "matroska,webm": matroska_is_whole}


class VideoFile:
    """The first video stream of a file.

    A file that is cut off or damaged is refused, as far as that can be known. Opening reads every packet and compares
    with the length in the header (MP4, AVI, WMV, FLV) or follows the blocks to the end (MKV, WebM, GIF). Reading
    decodes, in MP4, MOV, MKV and WebM, from the keyframe before each frame that is read, and all frames of other
    files. What cannot be known: damage in frames that are not decoded; where an MPEG stream (TS, PS) should end, or
    an MKV or MP4 that was recorded live, whose header says no length; frames lost from the middle of an AVI or WMV
    file; and damage within a frame that its codec can decode to something, as VP8, VP9, HEVC and GIF often can.

    Frames are turned and mirrored as the file's display matrix says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens the file and reads all its packets.

        Raises `VideoError` if it is missing, no regular file, cut off, no video, none of `CONTAINERS`, or beyond
        `MOST_FRAME_PIXELS`, `MOST_FRAMES` or `MOST_PACKETS`; `TypeError` for what is no path.
        """
        check_path("path", path)
        self._path = Path(path)
        with self._stream() as (container, stream, file):
            rate = stream.average_rate or stream.guessed_rate
            self.fps = float(rate) if rate else 0.0
            # Frames before and behind what an edit list shows are decoded and not shown.
            self.count, end, end_of_all = 0, 0.0, 0.0
            self._index = KeyframeIndex(container.format.name)
            for number, packet in enumerate(container.demux()):
                if number == MOST_PACKETS or self.count > MOST_FRAMES:
                    raise VideoError(
                        f"video '{path}' has more than {MOST_FRAMES} frames or {MOST_PACKETS} packets, sound "
                        "included. Cut it shorter."
                    )
                if packet.is_corrupt and packet.stream is stream:
                    raise self._broken(f"frame {self.count} is damaged")
                if packet.pts is not None:
                    until = float((packet.pts + (packet.duration or 0)) * packet.time_base)
                    end_of_all = max(end_of_all, until)
                    end = max(end, until) if packet.stream is stream else end
                if packet.stream is stream and packet.size > 0:
                    self.count += not packet.is_discard
                    self._index.add(packet)
            self._index.close()
            self._check_end(container, stream, file, end, end_of_all)
        if not self.count:
            raise VideoError(f"video '{path}' has no frames. Give one with a picture in it.")

    @property
    def can_seek(self) -> bool:
        """Whether a few frames can be read without decoding all: the file lists its keyframes and has several."""
        return self._index.can_seek

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """The frames at `indices` as RGB images; raises `VideoError` for those that cannot be decoded.

        Where `can_seek` is false, or all are read, every frame is decoded: one that cannot be is an error, and so is
        a stream that ends before all have come.
        """
        wanted = set(indices)
        if self.can_seek and len(wanted) < self.count:
            try:
                with self._stream() as (container, stream, _):
                    return collected(map(turned, self._index.frames(container, stream, wanted)))
            except (LostFrameError, VideoError):
                # Whether the file is broken or its index misleads, decoding all of it shows.
                pass
        with self._stream() as (container, stream, _):
            return collected(self._frames(container, stream, wanted))

    def _frames(self, container: Any, stream: Any, wanted: set[int]) -> Iterator[Image.Image]:
        count = 0
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise self._broken(f"frame {count} is damaged")
            if count == self.count:
                raise self._broken(f"more than the {count} frames in the file could be decoded")
            if count in wanted:
                yield turned(frame)
            count += 1
        if count != self.count:
            raise self._broken(f"{self.count} frames are in the file and {count} could be decoded")

    def _check_end(self, container: Any, stream: Any, file: BinaryIO, end: float, end_of_all: float) -> None:
        """Compare where the packets end, in seconds, with what the header says."""
        kind, said = container.format.name, 0.0
        if kind in _WALKS:
            with os.fdopen(os.dup(file.fileno()), "rb") as buffered:
                if not _WALKS[kind](buffered):
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
    def _stream(self) -> Iterator[tuple[Any, Any, BinaryIO]]:
        """The container, its first video stream and the file they are in; raises `VideoError`."""
        try:
            import av
        except ImportError as error:
            raise VideoError(
                "reading video files needs the package 'av', which is not installed. Install it with: "
                "pip install 'sinkprune[video]', or give the frames as a list."
            ) from error
        try:
            file = open_regular(self._path)
        except MissingError as error:
            raise VideoError(f"video '{self._path}': found no such file. {_GIVE}") from error
        except UnreadableError as error:
            raise VideoError(f"video '{self._path}' {error}. {_GIVE}") from error
        try:
            with file, av.open(_Reader(file), "r", options=_OPTIONS, metadata_errors="replace") as container:
                if not container.streams.video:
                    raise VideoError(f"'{self._path}' has no video in it. Give a file with a picture.")
                stream = container.streams.video[0]
                context = stream.codec_context
                if context is None:
                    raise VideoError(
                        f"video '{self._path}' is of a codec that PyAV does not know. Convert it to H.264."
                    )
                if context.width * context.height > MOST_FRAME_PIXELS:
                    raise VideoError(
                        f"video '{self._path}' has frames of {context.width}x{context.height} pixels, expected at "
                        f"most {MOST_FRAME_PIXELS} in all. Scale it down."
                    )
                context.options = {"err_detect": _CHECKS, "max_pixels": _OPTIONS["max_pixels"]}
                yield container, stream, file
        except (LostFrameError, VideoError):
            raise
        except MemoryError as error:
            raise VideoError(f"there is not enough memory for video '{self._path}'. Scale it down.") from error
        except Exception as error:
            # PyAV has errors of its own; what headers say without meaning goes through Python's arithmetic besides.
            reason = "it ends before any frame" if isinstance(error, EOFError) else _reason(error)
            raise VideoError(f"video '{self._path}' is broken or no video: {reason}. {_GIVE}") from error


class _Reader:
    """An open file as FFmpeg reads it, which asks for places that no file has and wants to be told by a number."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.read, self.tell = file, file.read, file.tell

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._file.seek(place, whence)
        except OSError as error:
            return -(error.errno or errno.EINVAL)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
