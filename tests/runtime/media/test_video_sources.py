"""Video files of strangers: no other file is opened for them, and none is longer or larger than is stated."""

from __future__ import annotations

import os
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
from support.models.video_files import write_video
from support.programs.repository import ROOT

av = pytest.importorskip("av")

CORPUS = ROOT / "tests" / "fuzz" / "corpus" / "videos"


@pytest.fixture
def pictures(photo: Image.Image) -> list[Image.Image]:
    """A camera that moves to the right."""
    return frames(6, (64, 48), photo)


def refusal(path: Path) -> str:
    """What a file is refused with, when it is opened or when it is read."""
    with pytest.raises(VideoError) as caught:
        video = VideoFile(path)
        video.read(range(video.count))
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
            assert sum(1 for _ in container.decode(video=0)) == 6, "the trap does not work"


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.mp4")
    assert "is a FIFO, expected a regular file" in refusal(tmp_path / "fifo.mp4")
    assert "is a device" in refusal(Path("/dev/zero"))
    assert "is a folder" in refusal(tmp_path)
    with pytest.raises(VideoError, match=r"'http://127.0.0.1:9/clip.mp4' is a URL; download it first"):
        VideoFile(Path("http://127.0.0.1:9/clip.mp4"))


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
    with pytest.raises(UnicodeDecodeError), av.open(str(path)):
        pass
    assert len(VideoFile(path).read(range(6))) == 6


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_what_was_once_found_is_read_or_refused(path: Path) -> None:
    refusal(path)


def test_damaged_files_are_read_or_refused_but_never_crash(pictures: list[Image.Image], tmp_path: Path) -> None:
    random, refused = np.random.default_rng(0), 0
    for suffix, codec in {"mp4": "libx264", "mkv": "mpeg4", "avi": "mpeg4", "ts": "mpeg4"}.items():
        data = write_video(tmp_path / f"clip.{suffix}", pictures, codec=codec).read_bytes()
        for attempt in range(40):
            damaged = bytearray(data)
            for place in random.integers(0, len(data) if attempt % 2 else 200, size=4):
                damaged[place] = random.integers(0, 256)
            (tmp_path / "damaged").write_bytes(damaged)
            try:
                video = VideoFile(tmp_path / "damaged")
                video.read([0])
            except VideoError:
                refused += 1
    assert 20 < refused < 200


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
