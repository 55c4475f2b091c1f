"""Videos over HTTP: answers are the pipeline's, and a lack of room for a video is no bug of the server."""

from __future__ import annotations

import base64
import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image
from tests.serving.test_server import QUESTION, served

from sinkprune import Pipeline, VideoFile
from sinkprune.runtime.media import video_file
from support.models.video_files import write_video


@pytest.mark.filterwarnings("ignore::sinkprune.contract.errors.PictureWarning")
def test_a_long_video(pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path) -> None:
    own = pipeline("qwen-tied", "fp32", ("prune-80",), max_frames=4)
    video = write_video(tmp_path / "clip.mp4", [photo.rotate(turn) for turn in range(24)], fps=2)
    url = "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 6}
    with served(own, budget="prune-80") as address:
        response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    expected = own.generate(VideoFile(video), QUESTION, budget="prune-80", max_new_tokens=6)
    details = response["sinkprune"]
    assert response["choices"][0]["message"]["content"] == expected.text
    assert details["tokens_per_layer"] == expected.tokens_per_layer
    assert (details["seen_frames"], details["seen_share"]) == ([4], [1.0])
    (size,) = details["seen_size"]
    assert tuple(size) == expected.images[0].layout.seen_size
    assert "the model sees 4 frames of the clip in place of 24, the bundle's limit" in details["notes"][-1]


@contextlib.contextmanager
def full_disk(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with Path("/dev/full").open("r+b") as file:
        patch.setattr(video_file, "NamedTemporaryFile", lambda prefix: file)
        yield


@contextlib.contextmanager
def no_descriptors(patch: pytest.MonkeyPatch) -> Iterator[None]:
    before, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("shortage", "status", "said"),
    [
        (full_disk, 507, "no room for a temporary file"),
        (no_descriptors, 503, "no free file descriptor"),
    ],
)
def test_without_room_for_a_video_the_request_is_rejected(
    shortage: Callable[[pytest.MonkeyPatch], contextlib.AbstractContextManager[None]],
    status: int,
    said: str,
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    own = pipeline("qwen-tied", "fp32", ("prune-80",), max_frames=4)
    video = write_video(tmp_path / "clip.mp4", [photo.rotate(turn) for turn in range(4)], fps=2)
    url = "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    with served(own, budget="prune-80") as address, httpx.Client(base_url=address, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        capfd.readouterr()
        with monkeypatch.context() as patch, shortage(patch):
            response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == status and said in response.json()["error"]["message"]
        assert "Traceback" not in capfd.readouterr().err
        assert client.post("/v1/chat/completions", json=body).status_code == 200
