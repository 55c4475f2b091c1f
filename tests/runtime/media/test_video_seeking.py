"""Frames that are sought are those of a full decode, and their times are their own time stamps in every container."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from sinkprune.contract.errors import VideoError
from sinkprune.runtime.families.qwen_processor import (
    end_to_end_indices,
    evenly_spaced_indices,
    nearest_frames,
    sample_frames,
)
from sinkprune.runtime.media.video_file import KeyframeIndex, LostFrameError, VideoFile
from support.models.clips import LIMITS, frames
from support.models.video_files import trimmed, turned, write_video

av = pytest.importorskip("av")

SIZE, COUNT = (96, 64), 40
SAMPLES = [(0,), (39,), (7, 8, 9), (0, 13, 26, 39), (19, 21, 38), tuple(range(1, 40))]
SOUGHT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "B-frames": ("mp4", "libx264", {"coding": {"g": "10", "bf": "3"}}),
    "short groups": ("mp4", "libx264", {"coding": {"g": "2", "bf": "1"}}),
    "open groups": ("mp4", "libx264", {"coding": {"x264-params": "keyint=10:min-keyint=10:open-gop=1:bframes=3"}}),
    "intra refresh": ("mkv", "libx264", {"coding": {"x264-params": "keyint=10:intra-refresh=1:bframes=0"}}),
    "MPEG-4 with B-frames": ("mov", "mpeg4", {"coding": {"g": "9", "bf": "2"}}),
    "HEVC": ("mp4", "libx265", {"coding": {"x265-params": "keyint=10:min-keyint=10:open-gop=1:log-level=none"}}),
    "Matroska": ("mkv", "libx264", {"coding": {"g": "10", "bf": "2"}}),
    "VP9": ("webm", "libvpx-vp9", {"coding": {"g": "10"}}),
    "frames of different lengths": ("mp4", "libx264", {"coding": {"g": "10", "bf": "2"}, "lengths": (1, 7, 2, 25)}),
    "sound": ("mp4", "libx264", {"coding": {"g": "10"}, "audio_seconds": 6.0}),
    "sound in Matroska": ("mkv", "libx264", {"coding": {"g": "10"}, "audio_seconds": 6.0}),
    "fragments": ("mp4", "libx264", {"coding": {"g": "10"}, "flags": {"movflags": "frag_keyframe+empty_moov"}}),
}
DECODED_WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "AVI": ("avi", "mpeg4", {"coding": {"g": "10", "bf": "2"}}),
    "sound in AVI": ("avi", "mpeg4", {"audio_seconds": 6.0}),
    "TS": ("ts", "libx264", {"coding": {"g": "10", "bf": "2"}}),
    "one keyframe": ("mp4", "libx264", {}),
}


def written(folder: Path, photo: Image.Image, kind: tuple[str, str, Mapping[str, Any]]) -> Path:
    suffix, codec, options = kind
    return write_video(folder / f"clip.{suffix}", frames(COUNT, SIZE, photo), codec=codec, **options)


def assert_as_the_full_decode(path: Path) -> None:
    """Every sample holds the frames that reading all of them gives."""
    video = VideoFile(path)
    whole = [np.asarray(frame) for frame in video.read(range(video.count))]
    assert len(whole) == video.count
    for sample in SAMPLES:
        wanted = [index for index in sample if index < video.count]
        for found, index in zip(video.read(wanted), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(found), whole[index], err_msg=f"frame {index} of {wanted}")


@pytest.mark.parametrize("name", [*SOUGHT, *DECODED_WHOLE])
def test_samples_are_the_frames_of_the_full_decode(name: str, photo: Image.Image, tmp_path: Path) -> None:
    path = written(tmp_path, photo, (SOUGHT | DECODED_WHOLE)[name])
    assert VideoFile(path).can_seek == (name in SOUGHT)
    assert_as_the_full_decode(path)
    if name == "B-frames":
        assert_as_the_full_decode(trimmed(path, 1.5, 1.3))


def test_seeking_needs_distinct_times_and_several_keyframes() -> None:
    matroska, times = "matroska,webm", [0, 1, 2]
    assert KeyframeIndex(matroska, times, {0, 2}).can_seek
    assert not KeyframeIndex("avi", times, {0, 2}).can_seek
    for known, keys in (([0, 1, 1], {0, 1}), ([0, None, 2], {0, 2}), (times, {0, None}), (times, {0})):
        assert not KeyframeIndex(matroska, known, keys).can_seek


def test_an_index_that_misleads_has_all_frames_decoded(
    photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, photo, SOUGHT["B-frames"])
    video = VideoFile(path)
    expected = np.asarray(video.read(range(COUNT))[13])
    # As in a file whose times are not those of its frames.
    video._index._times = [time + 1 for time in video._index._times]
    with video._stream() as (container, stream, _), pytest.raises(LostFrameError):
        list(video._index.frames(container, stream, [13]))
    np.testing.assert_array_equal(np.asarray(video.read([13])[0]), expected)


def test_damage_near_a_sought_frame_is_refused(photo: Image.Image, tmp_path: Path) -> None:
    path = written(tmp_path, photo, SOUGHT["B-frames"])
    with av.open(str(path)) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]
    data, (start, size) = bytearray(path.read_bytes()), places[20]
    data[start + 4 : start + size] = bytes(size - 4)
    path.write_bytes(data)
    with pytest.raises(VideoError, match=r"clip\.mp4' is broken"):
        VideoFile(path).read([25])


UPRIGHT = [(1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1)]
ON_ITS_SIDE = [(0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0), (0, -1, 1, 0)]


@pytest.mark.parametrize(("orientation", "matrix"), [*enumerate(UPRIGHT + ON_ITS_SIDE, 1)])
def test_a_clip_is_turned_as_a_picture_of_that_orientation(
    orientation: int, matrix: tuple[int, int, int, int], photo: Image.Image, tmp_path: Path
) -> None:
    path = written(tmp_path, photo, SOUGHT["B-frames"])
    plain = VideoFile(path).read([3])[0]
    plain.getexif()[0x0112] = orientation
    expected = ImageOps.exif_transpose(plain)
    video = VideoFile(turned(path, matrix))
    for found in (video.read([3])[0], video.read(range(COUNT))[3]):
        assert found.size == ((SIZE[1], SIZE[0]) if orientation > 4 else SIZE)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("name", ["B-frames", "Matroska", "VP9", "frames of different lengths"])
def test_only_the_group_of_a_frame_is_decoded(
    name: str, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = VideoFile(written(tmp_path, photo, SOUGHT[name]))
    seen, group = list[int](), KeyframeIndex._decode_group

    def counted(packets: Any) -> Any:
        for packet in packets:
            seen.append(packet.pts)
            yield packet

    def counting(index: KeyframeIndex, container: Any, *rest: Any) -> Any:
        demux = SimpleNamespace(seek=container.seek, demux=lambda stream: counted(container.demux(stream)))
        return group(index, demux, *rest)

    monkeypatch.setattr(KeyframeIndex, "_decode_group", counting)
    assert len(video.read([3, 4, 33])) == 3
    assert 0 < len(seen) < 32


B_FRAMES = {"bf": "2"}
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "mp4": ("libx264", B_FRAMES),
    "mov": ("mpeg4", B_FRAMES),
    "mkv": ("libx264", B_FRAMES),
    "webm": ("libvpx-vp9", {}),
    "ts": ("libx264", B_FRAMES),
    "avi": ("mpeg4", {}),
}
# Ten frames in the first second, then at 10, 20 and 30 s: a camera that slows down in the dark
SLOWER = (10, [1] * 9 + [91, 100, 100])
# The rate of the header, and the length of each frame but the last in frames of that rate
UNEVEN: dict[str, tuple[int, list[int]]] = {
    "slower": SLOWER,
    "a lost frame": (20, [1] * 14 + [2] + [1] * 14),
    "faster": (10, [40, 30, 20, 10, 5, 2, 1, 1, 1, 1, 1]),
}


def write(
    folder: Path, photo: Image.Image, suffix: str, fps: Any, lengths: list[int], **options: Any
) -> tuple[Path, list[float]]:
    """Return a file and the seconds of its frames after the first."""
    codec, coding = KINDS[suffix]
    pictures = frames(len(lengths) + 1, SIZE, photo)
    path = write_video(
        folder / f"clip.{suffix}", pictures, fps, codec=codec, coding=coding, lengths=[*lengths, 1], **options
    )
    return path, [float(place / Fraction(fps)) for place in accumulate(lengths, initial=0)]


def without_rate(path: Path, nanoseconds: int | None) -> Path:
    """Rewrite the nominal length of a frame in a Matroska file (DefaultDuration), or drop it."""
    data = bytearray(path.read_bytes())
    place = data.index(b"\x23\xe3\x83\x84")
    # A Void element of six bytes takes its place.
    nothing = b"\xec\x86" + bytes(6)
    data[place : place + 8] = data[place : place + 4] + nanoseconds.to_bytes(4, "big") if nanoseconds else nothing
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("pattern", "suffix"),
    [
        *(("slower", suffix) for suffix in KINDS),
        *itertools.product(["a lost frame", "faster"], ["mp4", "mkv", "avi"]),
    ],
)
def test_times_of_a_variable_rate_are_the_time_stamps(
    pattern: str, suffix: str, photo: Image.Image, tmp_path: Path
) -> None:
    path, times = write(tmp_path, photo, suffix, *UNEVEN[pattern])
    video = VideoFile(path)
    assert video.times == pytest.approx(times, abs=1e-6)
    assert video.fps == pytest.approx((len(times) - 1) / times[-1])
    for sampling in (end_to_end_indices, evenly_spaced_indices):
        seen = sample_frames(video, {**LIMITS, "max_frames": 8}, 2, sampling)
        assert seen.seconds == pytest.approx([times[index] for index in seen.indices], abs=1e-6)
        assert len({*seen.indices}) == min(8, max(4, int(len(times) / video.fps * 2)))
        assert np.array_equal(seen.frames[-1], video.read([seen.indices[-1]])[0])


@pytest.mark.parametrize(("suffix", "fps"), [*((suffix, Fraction(30000, 1001)) for suffix in KINDS), ("mkv", 24)])
def test_a_constant_rate_is_the_headers(suffix: str, fps: Any, photo: Image.Image, tmp_path: Path) -> None:
    """As transformers reads it with PyAV: the number of frames, and the stream's average rate."""
    path, _ = write(tmp_path, photo, suffix, fps, [1] * 89)
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
    video = VideoFile(path)
    assert video.times is None
    assert video.fps == rate
    for sampling in (end_to_end_indices, evenly_spaced_indices):
        taken = sample_frames(video, LIMITS, 2, sampling)
        assert [*taken.indices] == sampling(90, video.fps, LIMITS, 2)
        assert taken.seconds == tuple(index / video.fps for index in taken.indices)


@pytest.mark.parametrize("nanoseconds", [None, 1, 33_333_333, 4_000_000_000])
def test_a_matroska_file_whose_rate_is_missing_or_wrong(
    nanoseconds: int | None, photo: Image.Image, tmp_path: Path
) -> None:
    path, times = write(tmp_path, photo, "mkv", 10, [1] * 19)
    video = VideoFile(without_rate(path, nanoseconds))
    assert (video.fps, video.times) == (10.0, None)
    path, times = write(tmp_path, photo, "mkv", *SLOWER)
    assert VideoFile(without_rate(path, nanoseconds)).times == pytest.approx(times)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.data())
def test_frames_nearest_to_even_times(lengths: list[float], data: st.DataObject) -> None:
    times = [*accumulate(lengths, initial=0.0)]
    indices = sorted(data.draw(st.sets(st.integers(0, len(lengths)), min_size=1)))
    found = nearest_frames(times, indices)
    assert len(found) == len(indices)
    assert found == sorted({*found} & {*range(len(times))})
    wanted = [index * times[-1] / len(lengths) for index in indices]
    nearest = [min(range(len(times)), key=lambda number: abs(times[number] - time)) for time in wanted]
    if len({*nearest}) == len(nearest):
        off = [abs(times[number] - time) for number, time in zip(found, wanted, strict=True)]
        assert off == pytest.approx([abs(times[number] - time) for number, time in zip(nearest, wanted, strict=True)])


def test_joined_files_and_files_without_times_are_refused(photo: Image.Image, tmp_path: Path) -> None:
    path, _ = write(tmp_path, photo, "ts", 10, [1] * 19, flags={"mpegts_flags": "initial_discontinuity"})
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(VideoError, match=r"clip\.ts' is broken: its time stamps start again in the middle"):
        VideoFile(path)
    path, _ = write(tmp_path, photo, "mkv", 10, [1] * 19)
    with av.open(str(path)) as source, av.open(str(tmp_path / "still.mkv"), "w") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream, packet.pts, packet.dts = stream, 0, 0
                file.mux(packet)
    with pytest.raises(VideoError, match=r"still\.mkv' is broken: all of its 20 frames have the same time stamp"):
        VideoFile(tmp_path / "still.mkv")
