"""Video files, and the frames in them."""

from __future__ import annotations

import errno
import os
import re
import struct
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, BinaryIO

import numpy as np
from PIL import Image

from sinkprune.contract.checks import check_path, checks_options, escaped, install_command, needs_package
from sinkprune.contract.errors import VideoError
from sinkprune.runtime.media.clip import check_indices, collected
from sinkprune.runtime.media.frame import UnopenedPicture
from sinkprune.runtime.media.images import open_media

# Packets of these containers have the time of their frame, and headers list the keyframes.
_CONTAINERS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
_LONG = 300


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


CONTAINERS = ("mov", "matroska", "avi", "mpegts")
"""The containers that are read, by FFmpeg's names: `mov` includes MP4, and `matroska` WebM. None of them refers to
other files, as playlists do."""
MOST_FRAME_PIXELS = 1 << 24
"""The most pixels of a frame: 4096x4096. Decoders hold several frames at a time."""
MOST_FRAMES = 1 << 18
"""The most frames of a file: two hours at 30 a second."""
MOST_PACKETS = 4 * MOST_FRAMES
"""The most packets of a file, sound included."""

_PREFIX = "sinkprune-"
# More checks would reject the files of sloppy encoders.
_CHECKS = "crccheck+bitstream+buffer+explode"
_OPTIONS = {
    "format_whitelist": ",".join(CONTAINERS),
    # FFmpeg opens no file by name, and no address.
    "protocol_whitelist": "none",
    # A coded frame is a little larger than the picture in it.
    "max_pixels": str(MOST_FRAME_PIXELS * 9 // 8),
}
_GIVE = "Give a complete MP4, MOV, MKV, WebM, AVI or MPEG-TS file."
_TURN = Image.Transpose
# By a, b, c and d of a display matrix: it shows the pixel (x, y) at (a x + c y, b x + d y), with y downwards.
_TURNS = {
    (1, 0, 0, 1): None,
    (0, 1, -1, 0): _TURN.ROTATE_270,
    (-1, 0, 0, -1): _TURN.ROTATE_180,
    (0, -1, 1, 0): _TURN.ROTATE_90,
    (-1, 0, 0, 1): _TURN.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): _TURN.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): _TURN.TRANSPOSE,
    (0, -1, -1, 0): _TURN.TRANSVERSE,
}


class VideoFile:
    """The first video stream of a file that is no cover picture.

    Incomplete and damaged files are rejected where that can be detected. Opening reads every packet. It compares
    their end with the length in the header (MP4, AVI), or follows the blocks to the end (MKV, WebM).
    Reading decodes from the keyframe before each wanted frame in MP4, MOV, MKV and WebM, and all frames in others.

    This cannot be detected: damage in frames that are not decoded; the end of an MPEG stream (TS) and of a live
    recording (MKV, MP4), whose header has no length; frames lost from the middle of an AVI file; and damage within a
    frame that the codec decodes anyway, as VP8, VP9 and HEVC often do.

    Frames are turned and mirrored by the file's display matrix. A frame's time is its own time stamp, never its
    number over a rate in the header.
    """

    count: int
    """The number of frames."""
    fps: float
    """The constant rate of frames a second, or the mean of a variable rate."""
    times: tuple[float, ...] | None
    """The seconds of each frame after the first at a variable rate; None at a constant rate."""

    @checks_options
    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file and read all its packets.

        Raises `VideoError` if it is missing, no regular file, incomplete, no video, none of `CONTAINERS`, or beyond
        `MOST_FRAME_PIXELS`, `MOST_FRAMES` or `MOST_PACKETS`; `TypeError` if `path` is no path.
        """
        check_path("path", path)
        self._path = Path(path)
        with self._stream() as (container, stream, file):
            # An edit list may leave out frames at both ends. They are decoded and not counted.
            times: list[int | None] = []
            decoding_times: list[int | None] = []
            keys: set[int | None] = set()
            end = 0.0
            for number, packet in enumerate(container.demux()):
                if number == MOST_PACKETS or len(times) > MOST_FRAMES:
                    raise VideoError(
                        f"video '{path}' has more than {MOST_FRAMES} frames or {MOST_PACKETS} packets, sound "
                        "included. Cut it shorter."
                    )
                if packet.is_corrupt and packet.stream is stream:
                    raise self._broken(f"frame {len(times)} is damaged")
                if packet.pts is not None and packet.stream is stream:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
                if packet.stream is stream and packet.size > 0:
                    if not packet.is_discard:
                        times.append(packet.pts)
                        decoding_times.append(packet.dts)
                    if packet.is_keyframe:
                        keys.add(packet.pts)
            self.count, self._index = len(times), KeyframeIndex(container.format.name, times, keys)
            self._check_end(container, stream, file, end)
            if not self.count:
                raise VideoError(f"video '{path}' has no frames. Give one with a picture in it.")
            self.fps, self.times = self._frame_times(container.format.name, stream, times, decoding_times)

    @property
    def can_seek(self) -> bool:
        """Whether a few frames can be read without decoding all: the file lists several keyframes."""
        return self._index.can_seek

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """Return the frames at the ascending `indices` as RGB images.

        Raises `VideoError` if one cannot be decoded, and for a number that no frame has.
        If `can_seek` is false, or all frames are read, every frame must be decodable, and the stream complete.
        """
        check_indices(indices, self.count)
        wanted = set(indices)
        if self.can_seek and len(wanted) < self.count:
            try:
                with self._stream() as (container, stream, _):
                    return collected(map(_upright, self._index.frames(container, stream, wanted)))
            except (LostFrameError, VideoError):
                # The file is broken or its index misleads. Decoding everything shows which.
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
                yield _upright(frame)
            count += 1
        if count != self.count:
            raise self._broken(f"{self.count} frames are in the file and {count} could be decoded")

    def _check_end(self, container: Any, stream: Any, file: BinaryIO, end: float) -> None:
        """Compare the end of the packets, in seconds, with the length in the header."""
        kind, expected, rate = container.format.name, 0.0, stream.average_rate or stream.guessed_rate
        if kind.startswith("matroska"):
            with os.fdopen(os.dup(file.fileno()), "rb") as buffered:
                if not _matroska_is_whole(buffered):
                    raise self._broken("it ends too early, or blocks are missing in it")
        if kind.startswith("mov,") and stream.duration:
            expected = float(stream.duration * stream.time_base)
        elif kind == "avi" and rate:
            # Repeated frames are counted and have no packet.
            expected = float(stream.frames / rate)
        if rate and expected - end > 2.5 / rate:
            raise self._broken(f"its header says {expected:.2f} seconds and it ends after {end:.2f}")

    def _frame_times(
        self, kind: str, stream: Any, times: list[int | None], decoding_times: list[int | None]
    ) -> tuple[float, tuple[float, ...] | None]:
        """Return `fps` and `times`.

        Time stamps that fit a rate of the header, or another simple one, have that rate exactly, as transformers
        reads it. A sampled clip then has the frames that transformers samples.
        """
        # AVI has times of decoding only, and FFmpeg guesses others. Sorted, they are those of the frames in order.
        stamps = decoding_times if kind == "avi" or None in times else times
        if None in stamps:
            raise self._broken(f"{stamps.count(None)} of its {self.count} frames have no time stamp")
        ordered = [time for time in decoding_times if time is not None]
        # FFmpeg's estimates may go back by a frame.
        if any(later < earlier - 1 / stream.time_base for earlier, later in pairwise(ordered)):
            raise self._broken("its time stamps start again in the middle, as those of joined files do")
        ticks = np.sort(np.array(stamps, np.int64))
        ticks -= ticks[0]
        rates = [rate for rate in (stream.average_rate, stream.guessed_rate) if rate] or [Fraction(1)]
        if self.count > 1:
            if not ticks[-1]:
                raise self._broken(f"all of its {self.count} frames have the same time stamp")
            mean = Fraction(self.count - 1, int(ticks[-1])) / stream.time_base
            rates += [mean.limit_denominator(1001), mean]
        # Containers round times to ms, some of them twice.
        near = 0.002 / stream.time_base
        for rate in rates:
            interval = float(1 / (rate * stream.time_base))
            if (np.abs(ticks - np.arange(self.count) * interval) <= near).all():
                return float(rate), None
        return float(rates[-1]), tuple((ticks * float(stream.time_base)).tolist())

    def _broken(self, problem: str) -> VideoError:
        return VideoError(f"video '{self._path}' is broken: {problem}. Repair it or give a complete one.")

    @contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any, BinaryIO]]:
        """Yield the container, its first video stream and their file; raises `VideoError`."""
        install = (
            f"{install_command('video')}, or give the frames as a list. Only bundles of families with clips "
            "(Qwen2-VL, Qwen2.5-VL, Qwen3-VL) take either."
        )
        with needs_package("reading video files", install, VideoError):
            import av
        file = open_media("video", self._path, VideoError, _GIVE)
        # Texts of a file need not be UTF-8. PyAV 19 reads any, and earlier versions only on demand.
        reads_any = int(av.__version__.split(".")[0]) >= 19
        texts: dict[str, Any] = {} if reads_any else {"metadata_errors": "replace"}
        try:
            with file, av.open(_Reader(file), "r", options=_OPTIONS, **texts) as container:
                cover = av.stream.Disposition.attached_pic
                streams = [stream for stream in container.streams.video if not stream.disposition & cover]
                if not streams:
                    raise VideoError(f"'{self._path}' has no video in it. Give a file with a picture.")
                stream = streams[0]
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
            # PyAV has its own errors, and senseless headers cause any error of Python's arithmetic.
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            reason = "it ends before any frame" if isinstance(error, EOFError) else reason
            raise VideoError(f"video '{self._path}' is broken or no video: {reason}. {_GIVE}") from error


def note_slow(path: Path, video: VideoFile) -> None:
    """Print a note about a long `video` that must be decoded as a whole."""
    if not video.can_seek and video.count >= _LONG:
        sys.stderr.write(
            f"{escaped(str(path))}: decodes all {video.count} frames, because no list of keyframes leads to the "
            "few that are shown. Convert the video to MP4 with a keyframe every two seconds to read it faster.\n"
        )


class VideoBytes(UnopenedPicture):
    """The bytes of a video file. They are in a temporary file while frames are read."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data, self.name = data, name

    @contextmanager
    def opened(self) -> Iterator[VideoFile]:
        try:
            with _temporary_file() as file:
                file.write(self._data)
                file.flush()
                yield VideoFile(file.name)
        except VideoError as error:
            raise VideoError(re.sub(rf"'[^']*/{_PREFIX}[^']*'", "video_url", str(error))) from error


def _temporary_file() -> IO[bytes]:
    try:
        return NamedTemporaryFile(prefix=_PREFIX)
    except FileNotFoundError as error:
        # No folder can be written, as in a container that is read-only.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


class _Reader:
    """An open file for FFmpeg, which seeks to impossible places and expects a negative error number."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.read, self.tell = file, file.read, file.tell

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        try:
            return self._file.seek(place, whence)
        except OSError as error:
            return -(error.errno or errno.EINVAL)


def _upright(frame: Any) -> Image.Image:
    """Return a decoded frame as an RGB image, turned and mirrored by its display matrix.

    Raises `VideoError` for an angle that is no multiple of 90 degrees.
    """
    image: Image.Image = frame.to_image()
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return image
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    found = [round(number / (1 << 16), 2) for number in (a, b, c, d)]
    if tuple(found) not in _TURNS:
        raise VideoError(
            f"the video's display matrix is {found}, expected a turn by 0, 90, 180 or 270 degrees. Encode the video "
            "again, turned as it is to be shown."
        )
    turn = _TURNS[tuple(found)]
    return image if turn is None else image.transpose(turn)


# Elements of Matroska that contain elements
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
# A size with all bits set is unknown, as in live recordings.
_UNKNOWN = {2 ** (7 * width) - 1 for width in range(1, 9)}


def _matroska_is_whole(file: BinaryIO) -> bool:
    """Return whether elements (RFC 8794) of an open file lead up to the end of the segment.

    A segment of unknown size ends with the file. PyAV detects no missing end.
    """
    length = file.seek(0, os.SEEK_END)
    end, place = length, 0
    while place < end:
        file.seek(place)
        identity = _number(file, keep_length=True)
        size = _number(file)
        if identity is None or size is None:
            return False
        place = file.tell()
        if identity == _SEGMENT and size not in _UNKNOWN:
            end = place + size
        elif identity not in (_SEGMENT, _CLUSTER):
            place += size
    return place == end <= length


def _number(file: BinaryIO, *, keep_length: bool = False) -> int | None:
    """Return a number whose first byte has as many leading zeros as bytes follow; None at the end of the file."""
    first = file.read(1)
    if not first or not first[0]:
        return None
    width = 9 - first[0].bit_length()
    rest = file.read(width - 1)
    if len(rest) < width - 1:
        return None
    head = first[0] if keep_length else first[0] & (0x7F >> (width - 1))
    return int.from_bytes(bytes([head]) + rest, "big")
