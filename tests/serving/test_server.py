"""The server over HTTP, with OpenAI's client: answers are those of the pipeline, and errors are OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from tests.serving.test_chat_request import BODY, data_uri

from sinkprune import Pipeline, VideoFile
from sinkprune.contract.command_line.options import CommandParser
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.media import video_file
from sinkprune.serving.app import new_app
from sinkprune.serving.command import add_app_options
from sinkprune.serving.connections import Server
from sinkprune.serving.responses import TokenLogprobs
from support.models.video_files import write_video
from support.programs.printed_commands import blocks
from support.references.prompt_encoders import STOP, answer_encoder

Pipelines = Callable[..., Pipeline]

QUESTION = "What is on the table?"
TOKENS = 6
AS_JSON = {"Content-Type": "application/json"}


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what must hold within so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def served(pipeline: Pipeline, **changed: Any) -> Iterator[str]:
    """Yield the address of a server in this process, whose options are the usual ones but for those `changed`."""
    parser = CommandParser("sinkprune serve", "", "")
    add_app_options(parser)
    options = parser.parse([], Options)
    vars(options).update({"name": "m", "budget": "retain-64", "host": "0.0.0.0", **changed})
    server = Server(new_app(pipeline, options), drain_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # As in `sinkprune-serve`: each response would wait 40 ms for the client.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def asked(picture: Image.Image, question: str = QUESTION) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(picture)}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def post(
    address: str, headers: dict[str, str] | None = None, *, timeout: float = 60, **changes: Any
) -> httpx.Response:
    return httpx.post(f"{address}/v1/chat/completions", json={**BODY, **changes}, headers=headers, timeout=timeout)


@pytest.mark.parametrize("budget", ["none", "retain-64", "retain-192"])
def test_an_answer_is_that_of_the_pipeline(
    budget: str, client: openai.OpenAI, pipe: Pipeline, photo: Image.Image
) -> None:
    expected = pipe.generate(photo, QUESTION, budget=budget, max_new_tokens=TOKENS)
    for _ in range(2):
        found = client.chat.completions.create(model=f"m:{budget}", messages=asked(photo), max_tokens=TOKENS)
        assert found.choices[0].message.content == expected.text
        assert found.choices[0].finish_reason == expected.finish
        rows = expected.tokens_per_layer[0] + expected.prompt_tokens
        assert found.usage is not None and found.usage.prompt_tokens == rows
        assert found.usage.completion_tokens == len(expected.token_ids)
        done = found.model_extra["sinkprune"]  # type: ignore[index]
        assert done["seen_share"] == [pytest.approx(2 / 3)]
        assert (done["budget"], done["tokens_per_layer"]) == (budget, expected.tokens_per_layer)
    # The second answer has its picture from the session.
    # Unpruned, the last row runs again, because its result was not stored.
    reused = rows - 1 if budget == "none" else rows
    assert done["reused_towers"] == 1 and done["reused_rows"] == reused
    assert found.usage.prompt_tokens_details.cached_tokens == reused  # type: ignore[union-attr]


def test_a_request_without_the_session_takes_and_leaves_nothing(pipe: Pipeline, photo: Image.Image) -> None:
    body = {"messages": asked(photo), "max_tokens": 1}
    with served(pipe) as address:
        alone = [post(address, session=False, **body).json()["sinkprune"] for _ in range(2)]
        first, second = (post(address, **body).json()["sinkprune"] for _ in range(2))
        alone.append(post(address, session=False, **body).json()["sinkprune"])
    assert [(each["reused_towers"], each["reused_rows"]) for each in (*alone, first)] == [(0, 0)] * 4
    assert second["reused_towers"] == 1 and second["reused_rows"] > 0


def test_a_stream_has_the_same_text_in_pieces(client: openai.OpenAI, pipe: Pipeline, photo: Image.Image) -> None:
    expected = pipe.generate(photo, QUESTION, budget="retain-64", max_new_tokens=TOKENS)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS}
    chunks = [*client.chat.completions.create(model="m", messages=asked(photo), **options)]
    *texts, last, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == expected.text
    assert last.choices[0].finish_reason == expected.finish
    assert last.model_extra["sinkprune"]["budget"] == "retain-64"  # type: ignore[index]
    assert usage.usage is not None and usage.usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_log_probabilities_are_of_the_models_own_distribution(client: openai.OpenAI, photo: Image.Image) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": TOKENS, "model": "m"}
    whole = client.chat.completions.create(messages=asked(photo), **options)
    listed = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert listed is not None and len(listed) == whole.usage.completion_tokens  # type: ignore[union-attr]
    for token in listed:
        top = [each.logprob for each in token.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True) and max(top) <= 0
        # Greedy: the likeliest token.
        assert token.logprob == top[0] and token.token == token.top_logprobs[0].token
        assert token.bytes == token.top_logprobs[0].bytes
    streamed = client.chat.completions.create(messages=asked(photo), stream=True, **options)
    pieces = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.content or ()] == listed


@pytest.mark.parametrize("kind", ["pocket", "qwen", "llama"])
@pytest.mark.parametrize("text", ["日本語", "😀é", " the cat  sat", "a\ufffdb", "a <b>\n"])
def test_bytes_of_log_probabilities_join_to_the_text(kind: str, text: str) -> None:
    encoder = answer_encoder(kind)
    collected = TokenLogprobs([], encoder.tokenizer, 2)
    for token in [*encoder.answer_ids(text), STOP[kind][0]]:
        logits = np.zeros(700, np.float32)
        logits[token] = 9
        collected.chose(token, logits)
    assert b"".join(bytes(token["bytes"]) for token in collected.tokens) == text.encode()
    for token in collected.tokens:
        assert token["top_logprobs"][0]["bytes"] == token["bytes"]
        assert token["token"] == bytes(token["bytes"]).decode(errors="replace") or token is collected.tokens[-1]


def test_eight_at_once_are_as_alone(client: openai.OpenAI, pipe: Pipeline, photo: Image.Image) -> None:
    pictures = [photo.rotate(turn) for turn in range(0, 360, 45)]
    budgets = ["none", "retain-64"] * 4
    expected = [
        pipe.generate(picture, QUESTION, budget=budget, max_new_tokens=12).text
        for picture, budget in zip(pictures, budgets, strict=True)
    ]

    def ask(number: int) -> str | None:
        options: dict[str, Any] = {"model": f"m:{budgets[number]}", "messages": asked(pictures[number])}
        found = client.chat.completions.create(max_tokens=12, **options)
        return found.choices[0].message.content

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(ask, range(8))] == expected


def test_models_health_and_metrics(address: str, client: openai.OpenAI) -> None:
    # live-vlm-webui takes the first one if no name has the word llava.
    assert [model.id for model in client.models.list()] == ["m", "m:none", "m:retain-64", "m:retain-192"]
    assert client.models.retrieve("m:none").id == "m:none"
    with pytest.raises(openai.NotFoundError, match="The server has: m, m:none"):
        client.models.retrieve("other/model")
    assert httpx.get(f"{address}/health").json() == {"status": "ok", "model": "m", "backend": "ort-cpu"}

    def metric(name: str) -> float:
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    before = metric('sinkprune_requests_total{status="200"}'), metric("sinkprune_ttft_seconds_count")
    tokens = metric("sinkprune_generated_tokens_total") + post(address).json()["usage"]["completion_tokens"]
    assert metric("sinkprune_generated_tokens_total") == tokens
    assert metric('sinkprune_requests_total{status="200"}') == before[0] + 1
    assert metric("sinkprune_ttft_seconds_count") == before[1] + 1
    assert (metric("sinkprune_waiting"), metric("sinkprune_active")) == (0, 0)
    assert metric("sinkprune_session_bytes") > 0


def test_errors_are_openais(address: str, client: openai.OpenAI, photo: Image.Image) -> None:
    with pytest.raises(openai.BadRequestError, match="n is 2"):
        client.chat.completions.create(model="m", messages=asked(photo), n=2)
    with pytest.raises(openai.NotFoundError, match="The server has: m, m:none"):
        client.chat.completions.create(model="gpt", messages=asked(photo))
    # What is found only while the request runs.
    long, many = asked(photo, "very " * 3000 + "long?"), asked(photo) * 4
    for stream in (False, True):
        for messages, said in ((long, "the prompt is too long"), (many, "the prompt has 4 images")):
            with pytest.raises(openai.BadRequestError, match=said) as refused:
                client.chat.completions.create(model="m", messages=messages, stream=stream)
            assert refused.value.param == "messages"
        for field in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError, match="the answer is too long") as refused:
                client.chat.completions.create(model="m", messages=asked(photo), stream=stream, **{field: 4000})
            assert refused.value.param == field
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        found = httpx.request(method, address + path)
        assert found.status_code == status and path in found.json()["error"]["message"]


def test_a_key(pipe: Pipeline) -> None:
    with served(pipe, api_key="secret") as address:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert post(address, headers).status_code == 401
            assert httpx.get(f"{address}/v1/models", headers=headers).status_code == 401
        for scheme in ("Bearer", "bearer", "BEARER "):
            assert post(address, {"Authorization": f"{scheme} secret"}).status_code == 200
        assert post(address, {"Authorization": "Basic secret"}).status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_bug_of_ours_is_a_500_without_details(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("secret path")

    with served(pipe) as address:
        monkeypatch.setattr(pipe, "answer", broken)
        for stream in (False, True):
            found = post(address, stream=stream)
            assert found.status_code == 500
            assert "RuntimeError" in found.text and "secret path" not in found.text
        monkeypatch.undo()
        assert post(address).status_code == 200
    assert "secret path" in capsys.readouterr().err


PAUSE_MS = 400.0


def in_two_pieces(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield a body, with a pause before its last bytes."""
    content = json.dumps(body).encode()
    yield content[:-50]
    time.sleep(PAUSE_MS / 1e3)
    yield content[-50:]


def test_a_deadline_counts_from_the_arrival_of_a_request(pipe: Pipeline, photo: Image.Image) -> None:
    pipe.warm_up(photo, QUESTION, seconds=0.5)
    body = {"model": "m", "messages": asked(photo, QUESTION), "max_tokens": 2}
    try:
        with served(pipe) as address:
            for deadline_ms in (PAUSE_MS - 1, PAUSE_MS + 60_000):
                url, content = f"{address}/v1/chat/completions", in_two_pieces({**body, "deadline_ms": deadline_ms})
                found = httpx.post(url, content=content, headers=AS_JSON, timeout=60).json()["sinkprune"]
                report, waited = found["deadline"], found["read_ms"] + found["queued_ms"]
                assert report["deadline_ms"] == deadline_ms
                assert report["met"] == (report["measured_ms"] <= deadline_ms) == (deadline_ms > PAUSE_MS)
                assert PAUSE_MS <= found["read_ms"] <= waited < report["first_ms"] < report["measured_ms"]
                assert waited < report["predicted_first_ms"] <= report["predicted_ms"]
            metrics = httpx.get(f"{address}/metrics").text
            assert 'sinkprune_read_seconds_bucket{le="0.3"} 0.0' in metrics
    finally:
        pipe.costs = None
    with served(pipe) as address:
        error = post(address, deadline_ms=1000).json()["error"]
        assert error["param"] == "deadline_ms" and "costs" in error["message"]


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "base64", "curl"))), reason="a program is not installed")
def test_the_page_s_command_gets_the_pipeline_s_answer(
    pipeline: Pipelines, photo: Image.Image, tmp_path: Path
) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",))
    [text] = [block.text for block in blocks() if block.page == "server.md" and block.language == "bash"]
    # Larger than an argument may be.
    photo.resize((1280, 960)).save(tmp_path / "kitchen.jpg", quality=99)
    assert (tmp_path / "kitchen.jpg").stat().st_size > 128 << 10
    with served(pipe, name="llava-7b") as address:
        command = text.replace("http://127.0.0.1:8000", address)
        assert address in command
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True)
    with Image.open(tmp_path / "kitchen.jpg") as read:
        expected = pipe.generate(read, "What is on the table?", budget="retain-64", max_new_tokens=16)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected.text


def film(pipeline: Pipelines, photo: Image.Image, folder: Path, frames: int) -> tuple[Pipeline, Path, dict[str, Any]]:
    """Return a pipeline that takes videos, a video, and the body of a question about it."""
    video = write_video(folder / "clip.mp4", [photo.rotate(turn) for turn in range(frames)], fps=2)
    url = "data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode()
    parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 6}
    return pipeline("qwen-tied", "fp32", ("prune-80",), max_frames=4), video, body


@pytest.mark.filterwarnings("ignore::sinkprune.contract.errors.PictureWarning")
def test_a_long_video(pipeline: Pipelines, photo: Image.Image, tmp_path: Path) -> None:
    own, video, body = film(pipeline, photo, tmp_path, frames=24)
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


@pytest.mark.parametrize(
    ("shortage", "status", "said"),
    [(errno.ENOSPC, 507, "no room for a temporary file"), (errno.EMFILE, 503, "no free file descriptor")],
)
def test_without_room_for_a_video_the_request_is_rejected(
    shortage: int,
    status: int,
    said: str,
    pipeline: Pipelines,
    photo: Image.Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(prefix: str) -> None:
        raise OSError(shortage, "a shortage")

    own, _, body = film(pipeline, photo, tmp_path, frames=4)
    with served(own, budget="prune-80") as address:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(video_file, "NamedTemporaryFile", fail)
            response = post(address, **body)
        assert response.status_code == status and said in response.json()["error"]["message"]
        assert "Traceback" not in capfd.readouterr().err
        assert post(address, **body).status_code == 200


def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(pipe: Pipeline) -> None:
    with served(pipe, api_key="secret") as address:
        page = httpx.get(f"{address}/")
        assert httpx.get(f"{address}/v1/models").status_code == 401
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["x-content-type-options"] == "nosniff"
    assert 'id="key" type="password"' in page.text
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    found = {tag: re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page.text, re.DOTALL) for tag in ("style", "script")}
    for tag, contents in found.items():
        (content,) = contents
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        "img-src": "data:",
        "connect-src": "'self'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    # Without a policy it would load nothing from elsewhere and insert no text as HTML, too.
    assert re.findall(r"https?:|[\"'(]//|@import|url\(|(?:inner|outer)HTML|insertAdjacent|\beval\b", page.text) == []
