"""What requests can make the server hold: bytes that are counted, pictures that wait undecoded, and nothing after."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from threading import Event
from types import CoroutineType, FrameType
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.serving.test_chat_request import BODY, DAMAGED, PICTURE, TEXT, data_uri
from tests.serving.test_connections import HEAD, connected
from tests.serving.test_server import AS_JSON, post, served, until

from sinkprune import Pipeline
from sinkprune.contract.errors import PromptError
from sinkprune.runtime.media import images
from sinkprune.runtime.media.image_bytes import ImageBytes
from sinkprune.runtime.steps.request import Request
from sinkprune.serving import app, connections
from sinkprune.serving.chat_request import ChatReader, ChatRequest
from sinkprune.serving.connections import Body, Places
from sinkprune.serving.scheduler import Job


@pytest.fixture(scope="module")
def address(pipe: Pipeline) -> Iterator[str]:
    with served(pipe, max_body_bytes=1 << 20) as address:
        yield address


def messages(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


def test_what_cannot_fit_is_rejected_unread(pipe: Pipeline, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cup table " * 90_000
    # A context of 40,000 tokens may have these characters.
    with pytest.raises(PromptError, match="more than the model's 40000 positions"):
        pipe.prompts.check_length([text], 40_000)
    pipe.prompts.check_length([text], 400_000)
    monkeypatch.setattr(type(pipe.prompts), "encode", lambda *given: pytest.fail("it was tokenized"))
    monkeypatch.setattr(ImageBytes, "decoded", lambda *given: pytest.fail("its picture was decoded"))
    for wrong in (
        messages(PICTURE, {"type": "text", "text": text}),
        [{"role": "system", "content": text}, *messages(TEXT)],
    ):
        assert "characters, expected at most 32 for each" in post(address, messages=wrong).text
    monkeypatch.setattr(images, "_read", lambda *given: pytest.fail("its picture was read"))
    assert "4 images, expected at most 3" in post(address, messages=messages(*[PICTURE] * 4, TEXT)).text
    assert "more than 262144 values" in post(address, messages=[[]] * 300_000).text


def test_a_damaged_picture_is_named_by_its_place(address: str) -> None:
    for stream in (False, True):
        found = post(address, messages=messages(PICTURE, DAMAGED, TEXT), stream=stream)
        assert found.status_code == 400
        assert found.json()["error"]["message"].startswith("messages[0].content[1]: the image is damaged")


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        (b'{"priority" :\n-100, "model": "m"}', -100),
        (b'{"messages": ["\\"priority\\": 7"], "priority": 100}', 100),
        (b'{"priority": 1e2}', 1),
        (b'{"priority"', 0),
        (b"", 0),
    ],
)
def test_the_priority_is_known_before_a_body_is_parsed(body: bytes, priority: int) -> None:
    arrived = Body()
    arrived.data += body
    assert arrived.priority == priority


def test_places_are_taken_by_priority() -> None:
    """So that many bodies that take long to check keep none of a higher priority waiting."""
    entered: list[str] = []

    async def run() -> None:
        places = Places(1, more=1)

        async def enter(name: str, priority: int) -> None:
            await places.enter(priority)
            entered.append(name)

        order = {"a": 0, "b": 0, "c": 5, "d": 9, "e": 9}
        tasks = {name: asyncio.create_task(enter(name, priority)) for name, priority in order.items()}
        await asyncio.sleep(0.01)
        assert "".join(entered) == "ac"
        tasks["d"].cancel()
        for left, then in ((0, "ace"), (5, "ace"), (9, "aceb")):
            await asyncio.sleep(0.01)
            places.leave(left)
            await asyncio.sleep(0.01)
            assert "".join(entered) == then

    asyncio.run(run())


def test_a_message_of_many_parts_is_read_soon() -> None:
    """Each part was once copied for each that follows."""
    began = time.thread_time()
    texts = ChatReader._texts(None, {"content": [{"type": "text", "text": "a"}] * 87_000}, "it", [])  # type: ignore[arg-type]
    assert len(texts[0]) == 87_000 and time.thread_time() - began < 1


def head(size: int) -> bytes:
    return HEAD + f"Content-Length: {size}\r\n\r\n".encode()


def test_bodies_are_held_up_to_a_bound(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest that is still arriving makes room for others."""
    monkeypatch.setattr(connections, "_DISCARDING_S", 0.3)
    body = json.dumps({**BODY, "max_tokens": 1}).encode()
    with served(pipe, max_waiting_bytes=10_000, max_body_bytes=10_000) as address:
        with connected(address) as large, connected(address) as small:
            large.sendall(head(9_999) + b" " * 9_500)
            small.sendall(head(400) + b" " * 300)
            time.sleep(0.2)
            assert httpx.post(f"{address}/v1/chat/completions", content=body, headers=AS_JSON).status_code == 200
            small.sendall(b" " * 100)
            assert b" 400 " in small.recv(1000)
        # Nothing is left of them.
        filled = body[:-1] + b" " * (9_999 - len(body)) + b"}"
        assert httpx.post(f"{address}/v1/chat/completions", content=filled, headers=AS_JSON).status_code == 200


def test_a_request_that_is_answered_keeps_its_room(pipe: Pipeline) -> None:
    long = json.dumps({**BODY, "max_tokens": 500, "min_tokens": 500, "stream": True}).encode()
    body = json.dumps({**BODY, "max_tokens": 1}).encode()
    with served(pipe, max_waiting_bytes=len(long) + len(body) - 1) as address:
        with connected(address) as first:
            first.sendall(head(len(long)) + long)
            assert b" 200 " in first.recv(100)
            found = httpx.post(f"{address}/v1/chat/completions", content=body, headers=AS_JSON)
            assert (found.status_code, found.headers.get("retry-after")) == (429, "1")
        until(lambda: httpx.post(f"{address}/v1/chat/completions", content=body, headers=AS_JSON).status_code == 200)


NO_VIDEO = {"type": "video_url", "video_url": {"url": data_uri(Image.new("L", (8, 8)))}}
KINDS: dict[str, dict[str, Any]] = {
    "right": {},
    "stream": {"stream": True},
    "log probabilities": {"logprobs": True, "top_logprobs": 2},
    "closed list": {"guided_choice": ["yes", "no"]},
    "unknown budget": {"budget": "retain-63"},
    "damaged": {"messages": messages(DAMAGED, TEXT)},
    "damaged stream": {"messages": messages(DAMAGED, TEXT), "stream": True},
    "no base64": {"messages": messages({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}, TEXT)},
    "too long": {"messages": messages({"type": "text", "text": "cup table " * 2000})},
    "too many tokens": {"max_tokens": 10**6},
    "not for this model": {"messages": messages(NO_VIDEO, TEXT)},
    "schema": {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
"""Requests that are answered, or rejected at each of the places where requests are."""


def send_all(address: str) -> None:
    for changes in KINDS.values():
        post(address, max_tokens=3, **changes) if "max_tokens" not in changes else post(address, **changes)
    post(address, messages=messages({"type": "text", "text": " " * (1 << 20)}))
    url = f"{address}/v1/chat/completions"
    for content in (b"{", b"[]", b"\xff", b"{}", b'{"model": "m", "messages": [{}]}'):
        httpx.post(url, content=content, headers=AS_JSON)
    httpx.post(url, content=b"{}", headers={"Content-Type": "text/plain"})
    for path in ("/v1/nothing", "/v1/models/other", "/v1/chat/completions"):
        httpx.get(address + path)
    whole = json.dumps({**BODY, "max_tokens": 200, "min_tokens": 200, "stream": True}).encode()
    for sent in (b"", head(9)[:50], head(100) + b"{", head(len(whole)) + whole):
        with connected(address) as gone:
            gone.sendall(sent)
            if len(sent) > len(whole):
                gone.recv(100)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def test_no_request_survives_its_answer(pipe: Pipeline, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python's collector of cycles: neither strings nor pictures cause it to run."""

    def send() -> None:
        send_all(address)
        with monkeypatch.context() as patch:
            patch.setattr(
                type(pipe.family), "inputs", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
            )
            found = post(address, session=False)
            assert found.status_code == 507

    send()
    gc.collect()
    gc.disable()
    try:
        send()
        until(lambda: "sinkprune_active 0.0" in httpx.get(f"{address}/metrics").text)
        time.sleep(0.3)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [*gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    held = (Body, ChatRequest, Request, ImageBytes, Job, Image.Image)
    frames = [str(one) for one in found if isinstance(one, (FrameType, CoroutineType)) and "sinkprune" in str(one)]
    assert not [one for one in found if isinstance(one, held)], frames
    assert not frames


def test_a_client_that_expects_a_status_first_gets_it_at_once(address: str) -> None:
    """Without `100 Continue`, after which it would send a body that is not read."""
    text = HEAD.replace(b"json", b"text") + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    with connected(address) as client:
        client.sendall(text)
        assert client.recv(1000).startswith(b"HTTP/1.1 415 ")


def test_nothing_computes_for_clients_that_left(address: str) -> None:
    """Whenever they leave: while the body arrives or waits, while it is prepared, or in the middle of the answer."""
    rng = np.random.default_rng(0)
    for number in range(100):
        body = {**BODY, "max_tokens": 500, "min_tokens": 500, "stream": bool(number % 2), "priority": number % 3}
        content = json.dumps(body | ({"guided_choice": [f"text {n}" for n in range(99)]} if number % 5 == 0 else {}))
        sent = head(len(content)) + content.encode()
        with connected(address) as client:
            client.sendall(sent[: int(rng.integers(len(sent))) if number % 4 == 0 else len(sent)])
            time.sleep(rng.exponential(0.01))
    # A second, and what a busy machine adds.
    for state in ("waiting", "active"):
        until(lambda state=state: f"sinkprune_{state} 0.0" in httpx.get(f"{address}/metrics").text, 6)  # type: ignore[misc]


def test_a_stream_ends_also_if_its_client_left_before_the_first_event() -> None:
    ended = list[str]()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"never"

    async def send(message: object) -> None:
        raise OSError("the client left")

    stream = app._Stream(chunks(), lambda: ended.append("ended"))
    with pytest.raises(OSError, match="left"):
        asyncio.run(stream({"type": "http"}, send, send))  # type: ignore[arg-type]
    assert ended == ["ended"]


@pytest.mark.parametrize("padding", [0, 200_000, 3_000_000])
def test_a_body_is_not_parsed_for_a_client_that_left(
    padding: int, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn stops to read the connection of a body of more than 64 KiB."""
    begun, go, read = list[int](), Event(), ChatReader.read
    whole = json.dumps({**BODY, "user": "x" * padding}).encode()

    def slow(reader: ChatReader, body: bytes) -> ChatRequest:
        begun.append(len(body))
        go.wait(10)
        return read(reader, body)

    monkeypatch.setattr(app, "_PARSED_AT_ONCE", 0)
    monkeypatch.setattr(ChatReader, "read", slow)
    with served(pipe) as address:
        with connected(address) as first:
            # In the place for one of a higher priority than all.
            first.sendall(head(len(whole)) + whole)
            until(lambda: len(begun) == 1)
            with connected(address) as second:
                second.sendall(head(len(whole)) + whole)
                time.sleep(0.3)
            time.sleep(0.3)
            go.set()
            assert first.recv(100).startswith(b"HTTP/1.1 200 ")
        until(lambda: 'status="499"} 1.0' in httpx.get(f"{address}/metrics").text)
    assert len(begun) == 1
