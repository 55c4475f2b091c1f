"""The times of a response: reading, queue and first token make up what the client waits for its first text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.serving.test_server import AS_JSON, QUESTION, asked, served

from sinkprune import Pipeline

PAUSE_MS = 400.0


@pytest.fixture(scope="module")
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("gqa-112", "fp32", ("retain-64", "retain-192"), max_images=3)


def in_two_pieces(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield a body, with a pause before its last bytes."""
    content = json.dumps(body).encode()
    yield content[:-50]
    time.sleep(PAUSE_MS / 1e3)
    yield content[-50:]


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the server did for a request whose body pauses."""
    url, content = f"{address}/v1/chat/completions", in_two_pieces(body)
    response = httpx.post(url, content=content, headers=AS_JSON, timeout=60)
    found: dict[str, Any] = response.json()["sinkprune"]
    return found


def test_the_first_text_comes_after_reading_queue_and_first_token(pipe: Pipeline, photo: Image.Image) -> None:
    body = {"model": "m", "messages": asked(photo, QUESTION), "stream": True, "max_tokens": 4}
    first, done = 0.0, {}
    with served(pipe) as address:
        began = time.perf_counter()
        url, content = f"{address}/v1/chat/completions", in_two_pieces(body)
        with httpx.stream("POST", url, content=content, headers=AS_JSON) as response:
            for line in response.iter_lines():
                first = first or (time.perf_counter() - began) * 1e3
                done = json.loads(line.removeprefix("data: ")).get("sinkprune", done) if "{" in line else done
        metrics = httpx.get(f"{address}/metrics").text
    assert done["read_ms"] >= PAUSE_MS
    assert first >= done["read_ms"] + done["queued_ms"] + done["ms"]["ttft"]
    assert 'sinkprune_read_seconds_bucket{le="0.3"} 0.0' in metrics and "sinkprune_read_seconds_count 1.0" in metrics


def test_a_deadline_counts_from_the_arrival_of_a_request(pipe: Pipeline, photo: Image.Image) -> None:
    pipe.warm_up(photo, QUESTION, seconds=0.5)
    body = {"model": "m", "messages": asked(photo, QUESTION), "max_tokens": 2}
    try:
        with served(pipe) as address:
            for deadline_ms in (PAUSE_MS - 1, PAUSE_MS + 60_000):
                found = post(address, {**body, "deadline_ms": deadline_ms})
                report, waited = found["deadline"], found["read_ms"] + found["queued_ms"]
                assert report["deadline_ms"] == deadline_ms
                assert report["met"] == (report["measured_ms"] <= deadline_ms) == (deadline_ms > PAUSE_MS)
                assert waited < report["first_ms"] < report["measured_ms"]
                assert waited < report["predicted_first_ms"] <= report["predicted_ms"]
    finally:
        pipe.costs = None
