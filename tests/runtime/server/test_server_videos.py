"""Videos over HTTP: the answer is the pipeline's, and the response says what the model sees of a long one."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from PIL import Image
from tests.runtime.server.test_server import QUESTION, served

from sinkprune import Pipeline, VideoFile
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
