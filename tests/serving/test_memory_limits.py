"""What strangers can make the server hold, with the memory that docs/guarantees.md states and no more."""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.serving.test_chat_request import PICTURE, TEXT, data_uri
from tests.serving.test_connections import HEAD, connected
from tests.serving.test_server import AS_JSON

from support.programs.commands import own_process

MIB = 1 << 20
MOST_BODY, MOST_WAITING, MOST_SESSION = 8, 24, 16
"""MiB."""
OPTIONS = (
    *("--max-body-mb", MOST_BODY, "--max-waiting-bytes", MOST_WAITING * MIB, "--session-mb", MOST_SESSION),
    *("--threads", 1, "--name", "m", "--backend", "ort-cpu"),
)
SPARE = 96
"""MiB for what the model computes, threads and buffers."""


def data_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


@pytest.fixture(scope="module")
def server(bundle: Callable[..., Path]) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a server."""
    path = bundle("gqa-112", "fp32", ("retain-64",), max_images=2)
    words = own_process("sinkprune-serve", path, "--port", 0, "--json", *OPTIONS)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        address = json.loads(running.stdout.readline())["url"].removesuffix("/v1")
        try:
            for _ in range(3):
                assert ask(address).status_code == 200
            yield address, running.pid
        finally:
            running.terminate()


def ask(address: str, *parts: Any, **fields: Any) -> httpx.Response:
    content = [*(parts or (PICTURE,)), TEXT]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
    return httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)


def at_once(count: int, act: Callable[[int], int], expected: set[int]) -> None:
    with ThreadPoolExecutor(count) as clients:
        found = {*clients.map(act, range(count))}
    assert found <= expected, found


def large(number: int) -> dict[str, Any]:
    """Return a part with a picture of the most pixels, in some 12 KB."""
    image = Image.new("1", (8192, 8192))
    image.putpixel((number, 0), 1)
    return {"type": "image_url", "image_url": {"url": data_uri(image)}}


def slow_bodies(address: str) -> None:
    with ExitStack() as held:
        for _ in range(6):
            client = held.enter_context(connected(address))
            client.sendall(HEAD + f"Content-Length: {MOST_BODY * MIB}\r\n\r\n".encode())
            client.setblocking(False)
            until, rest = time.monotonic() + 1, MOST_BODY * MIB - 1
            while rest and time.monotonic() < until:
                try:
                    rest -= client.send(b" " * min(rest, MIB))
                except BlockingIOError:
                    time.sleep(0.001)
                except OSError:
                    # It made room for another.
                    break
        assert ask(address).status_code == 200


def waiting_bodies(address: str) -> None:
    padding = {"user": "x" * (MOST_BODY * MIB - 4096)}
    at_once(6, lambda _: ask(address, max_tokens=50, min_tokens=50, **padding).status_code, {200, 429})


def costly_json(address: str) -> None:
    """Texts of four bytes a character in Python, objects without content, and many small values."""
    contents = [
        json.dumps({"user": "\N{GRINNING FACE}" + "a" * (MOST_BODY * MIB - 4096)}, ensure_ascii=False).encode(),
        b'{"messages": [' + b"{}," * (2 * MIB) + b"{}]}",
        b'{"messages": ["' + b"\\u00e9" * MIB + b'"]}',
        b"[" * (7 * MIB),
    ]

    def send(number: int) -> int:
        url, content = f"{address}/v1/chat/completions", contents[number]
        return httpx.post(url, content=content, headers=AS_JSON, timeout=60).status_code

    at_once(4, send, {400, 404, 429})


def large_pictures(address: str) -> None:
    """Requests at once, each with two of them: none holds a picture while it decodes another."""
    parts = [large(number) for number in range(2)]
    at_once(2, lambda number: ask(address, *parts).status_code, {200})


def sessions(address: str) -> None:
    for number in range(8):
        noise = Image.effect_noise((1200, 900), 40 + number)
        assert ask(address, {"type": "image_url", "image_url": {"url": data_uri(noise)}}).status_code == 200


def connections(address: str) -> None:
    with ExitStack() as held:
        for _ in range(900):
            held.enter_context(connected(address)).sendall(HEAD)
        assert ask(address).status_code == 200


def long_texts(address: str) -> None:
    words = [{"type": "text", "text": text} for text in ("a" * (7 * MIB), "cup table " * (MIB // 2))]
    at_once(2, lambda number: ask(address, words[number]).status_code, {400})


def forms(address: str) -> None:
    schemas = [
        {"type": "integer", "multipleOf": 9999991},
        {"type": "object", "properties": {f"a{n}": {"type": "number", "multipleOf": 7} for n in range(200)}},
        {"type": "string", "minLength": 5000, "maxLength": 100_000},
        {"type": "array", "items": {"type": "string", "pattern": "(a|b)*a(a|b){14}"}, "minItems": 500},
    ]
    at_once(4, lambda number: ask(address, guided_json=schemas[number]).status_code, {200, 400})


ROWS: list[tuple[Callable[[str], None], int]] = [
    (slow_bodies, MOST_WAITING),
    (waiting_bodies, MOST_WAITING + 10 * MOST_BODY),
    (costly_json, MOST_WAITING + 10 * MOST_BODY),
    (large_pictures, 450),
    (sessions, MOST_SESSION + 50),
    (connections, 60),
    (long_texts, MOST_WAITING + 10 * MOST_BODY),
    (forms, 50),
]
"""What clients do, and the MiB that it may take."""


@pytest.mark.parametrize(("attack", "most"), ROWS, ids=[attack.__name__ for attack, _ in ROWS])
def test_the_server_answers_with_the_memory_that_is_stated(
    attack: Callable[[str], None], most: int, server: tuple[str, int]
) -> None:
    """Before, during and after."""
    address, process = server
    before = resource.prlimit(process, resource.RLIMIT_DATA)
    assert ask(address).status_code == 200
    limit = data_bytes(process) + (most + SPARE) * MIB
    resource.prlimit(process, resource.RLIMIT_DATA, (limit, before[1]))
    try:
        with ThreadPoolExecutor(1) as other:
            done = other.submit(attack, address)
            asked = []
            while not done.done() or not asked:
                asked.append(ask(address, priority=100).status_code)
            done.result()
        assert {*asked} <= {200, 429} and 200 in asked
        assert ask(address).status_code == 200
    finally:
        resource.prlimit(process, resource.RLIMIT_DATA, before)
