"""Video files of strangers: whole ones are read, cut and damaged ones refused, and no other file is opened."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune.contract.errors import VideoError
from sinkprune.runtime.families.qwen_processor import sample_frames
from sinkprune.runtime.media.clip import MOST_SHOWN_PIXELS, Clip
from sinkprune.runtime.media.video_file import MOST_FRAME_PIXELS, VideoFile
from support.models.clips import LIMITS, frames
from support.models.video_files import trimmed, write_video
from support.programs.repository import ROOT
from support.programs.slow_cases import every

av = pytest.importorskip("av")

CORPUS = ROOT / "tests" / "fuzz" / "corpus" / "videos"
SIZE, COUNT = (160, 112), 30


@pytest.fixture
def pictures(photo: Image.Image) -> list[Image.Image]:
    """A camera that moves to the right."""
    return frames(COUNT, SIZE, photo)


def read(path: Path) -> list[Image.Image]:
    """All frames, as a request for them would read them."""
    video = VideoFile(path)
    return video.read(range(video.count))


def refusal(path: Path) -> str:
    """What a file is refused with, when it is opened or when it is read."""
    with pytest.raises(VideoError) as caught:
        read(path)
    assert f"'{path}'" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("name", "playlist"), [("clip.m3u8", "hls"), ("clip.mp4", "ffconcat"), ("clip.mp4", "hls")])
def test_a_playlist_opens_no_other_file(
    name: str, playlist: str, pictures: list[Image.Image], tmp_path: Path
) -> None:
    write_video(tmp_path / "secret.ts", pictures)
    (tmp_path / name).write_bytes((CORPUS / playlist).read_bytes())
    assert "MP4, MOV, MKV" in refusal(tmp_path / name)
    if (name, playlist) != ("clip.mp4", "hls"):
        with av.open(str(tmp_path / name)) as container:
            assert sum(1 for _ in container.decode(video=0)) == COUNT, "the trap does not work"


def test_metadata_that_is_not_utf_8_is_no_obstacle(pictures: list[Image.Image], tmp_path: Path) -> None:
    path = tmp_path / "clip.mkv"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "TITLE"
        stream = container.add_stream("mpeg4", rate=10)
        stream.metadata["artist"] = "ARTIST"
        stream.width, stream.height = pictures[0].size
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode(None))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"TITLE", b"T\xff\xfeLE").replace(b"ARTIST", b"ART\xe9ST"))
    # Before PyAV 19, av.open itself fails.
    assert len(read(path)) == COUNT


def test_frames_larger_than_the_header_are_refused(tmp_path: Path) -> None:
    """The header speaks of few pixels, and the codec meets many."""
    side = int(MOST_FRAME_PIXELS**0.5)
    write_video(tmp_path / "large.avi", [Image.new("RGB", (side, side + 1024))], codec="mjpeg")
    path = write_video(tmp_path / "small.avi", [Image.new("RGB", (64, 48))] * 20, codec="mjpeg")
    whole, large = path.read_bytes(), (tmp_path / "large.avi").read_bytes()
    sizes = [data[data.index(b"avih") + 40 : data.index(b"avih") + 48] for data in (whole, large)]
    assert sizes[0] != sizes[1]
    start = large.index(b"\xff\xd8", large.index(b"movi"))
    length = int.from_bytes(large[start - 4 : start], "little")
    frame = large[start : start + length]
    first = whole.index(b"00dc", whole.index(b"movi"))
    path.write_bytes(whole[:first] + b"00dc" + length.to_bytes(4, "little") + frame + whole[first:])
    refusal(path)


def test_frames_that_are_too_large_together_are_refused_with_a_way_out(tmp_path: Path) -> None:
    count = MOST_SHOWN_PIXELS // 2000**2 + 1
    picture = Image.new("RGB", (2000, 2000))
    path = write_video(tmp_path / "many.avi", [picture] * count, codec="mjpeg")
    settings = {**LIMITS, "fps": 10.0}
    for video in (VideoFile(path), Clip([picture] * count, fps=10)):
        with pytest.raises(VideoError, match=rf"more than {MOST_SHOWN_PIXELS} pixels together.*smaller --max-frames"):
            sample_frames(video, settings, 1)
    assert len(sample_frames(VideoFile(path), {**settings, "max_frames": 4}, 2).frames) == 4


@pytest.mark.slow
def test_the_largest_clip_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    side = int(MOST_FRAME_PIXELS**0.5)
    picture = Image.linear_gradient("L").resize((side, side)).convert("RGB")
    write_video(tmp_path / "large.mkv", [picture] * (MOST_SHOWN_PIXELS // side**2), codec="libx264")
    script = """
import re, sys
from sinkprune.runtime.media.video_file import VideoFile
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
video = VideoFile(sys.argv[1])
assert len(video.read(range(video.count))) == 8
print(peak() - before)
"""
    command = [sys.executable, "-c", script, tmp_path / "large.mkv"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9


FAST_START = {"movflags": "faststart"}
"""The header of an MP4 stands in front, and is there when the end is not."""
CUT = [
    ("mp4", "libx264", {}),
    ("mov", "mpeg4", {}),
    ("mkv", "libx264", {}),
    ("webm", "libvpx-vp9", {}),
    ("avi", "mpeg4", {}),
    ("mp4", "libx264", FAST_START),
    ("mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    ("mkv", "mpeg4", {}),
    ("mkv", "libx265", {}),
    ("mkv", "libsvtav1", {}),
    ("webm", "libvpx", {}),
    ("avi", "mjpeg", {}),
]


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize(("start", "seconds", "left"), [(0.7, 1, 10), (0, 1, 10), (0.7, 2.3, 23)])
def test_a_trim_shows_the_frames_of_its_edit_list(
    codec: str, start: float, seconds: float, left: int, pictures: list[Image.Image], tmp_path: Path
) -> None:
    path = write_video(tmp_path / "clip.mp4", pictures, codec=codec, flags=FAST_START)
    found = read(trimmed(path, start, seconds))
    assert len(found) == left
    first = np.asarray(pictures[round(start * 10)], float)
    assert np.abs(np.asarray(found[0], float) - first).mean() < 8
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(VideoError, match=r"clip\.mp4' is broken"):
        read(path)


@pytest.mark.parametrize(("suffix", "codec", "flags"), CUT)
@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.slow), 0.9])
def test_a_file_without_its_end_is_refused_and_not_used_as_far_as_it_goes(
    share: float, suffix: str, codec: str, flags: dict[str, str], pictures: list[Image.Image], tmp_path: Path
) -> None:
    path = write_video(tmp_path / f"clip.{suffix}", pictures, codec=codec, flags=flags)
    assert len(read(path)) == COUNT
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(VideoError, match=rf"clip\.{suffix}' is broken"):
        read(path)


@pytest.mark.parametrize(
    ("suffix", "codec", "flags"), every(2, (kind for kind in [*CUT, ("ts", "mpeg4", {})] if kind[1] != "libx265"))
)
def test_a_file_with_a_stretch_of_zeros_is_refused(
    suffix: str, codec: str, flags: dict[str, str], photo: Image.Image, tmp_path: Path
) -> None:
    """Long enough to hide where a frame begins: a codec may make something of any bytes within one."""
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, *SIZE[::-1], 3), dtype=np.uint8)
    pictures = frames(COUNT, SIZE, photo)
    noisy = [Image.blend(*pair, 0.4) for pair in zip(pictures, map(Image.fromarray, noise), strict=True)]
    path = write_video(tmp_path / f"clip.{suffix}", noisy, codec=codec, flags=flags)
    whole = path.read_bytes()
    start, length = len(whole) // 2, len(whole) // 5
    path.write_bytes(whole[:start] + bytes(length) + whole[start + length :])
    with pytest.raises(VideoError, match=rf"clip\.{suffix}' is broken"):
        read(path)


def test_files_that_are_no_videos(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.mp4")
    for name, content, said in (
        ("empty.mp4", b"", r"empty\.mp4' is broken or no video: .*[a-z]\. Give"),
        ("text.mkv", b"no video at all" * 100, r"text\.mkv' is broken or no video: .*[a-z]\. Give"),
        ("fifo.mp4", None, "is a FIFO, expected a regular file"),
        ("none.mp4", None, "no such file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(VideoError, match=said) as caught:
            VideoFile(tmp_path / name)
        assert "Errno" not in str(caught.value)
    with pytest.raises(VideoError, match=r"'http://127.0.0.1:9/clip.mp4' is a URL; download it first"):
        VideoFile(Path("http://127.0.0.1:9/clip.mp4"))


def test_a_file_without_frames_and_one_of_sound_alone(tmp_path: Path) -> None:
    for name in ("empty.mkv", "empty.avi"):
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height = SIZE
            container.start_encoding()
        assert "Errno" not in refusal(tmp_path / name)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=48000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(VideoError, match=r"sound\.mp4' has no video"):
        VideoFile(tmp_path / "sound.mp4")


def test_a_cover_in_front_of_the_tracks_is_no_frame(pictures: list[Image.Image], tmp_path: Path) -> None:
    path = write_video(tmp_path / "cover.mp4", pictures, codec="libx264")
    plain = read(path)

    def box(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", 8 + len(content)) + name + content

    image = io.BytesIO()
    pictures[0].save(image, "JPEG")
    cover = box(b"covr", box(b"data", struct.pack(">II", 13, 0) + image.getvalue()))
    handler = box(b"hdlr", bytes(8) + b"mdir" + bytes(13))
    facts = box(b"udta", box(b"meta", bytes(4) + handler + box(b"ilst", cover)))
    data = path.read_bytes()
    start, tracks = data.index(b"moov") - 4, data.index(b"trak") - 4
    path.write_bytes(data[:start] + box(b"moov", data[start + 8 : tracks] + facts + data[tracks:]))
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "mjpeg"
    assert read(path) == plain
