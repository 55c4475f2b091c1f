"""Connections of clients that send or take little: they end in time, and keep no other client out."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serving.test_chat_request import BODY
from tests.serving.test_server import post, served, until

from sinkprune import Pipeline
from sinkprune.contract.errors import UsageError
from sinkprune.serving import connections

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_BODY = HEAD + b"Content-Length: 100000\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
FEW = 6


@pytest.fixture
def few(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with few connections."""
    monkeypatch.setattr(connections, "most_connections", lambda max_queue: FEW)
    with served(pipe, max_queue=2) as address:
        yield address


@pytest.fixture
def hasty(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with short times."""
    for name in ("_HEAD_S", "_TAKING_S", "_DISCARDING_S", "_ARRIVING_S"):
        monkeypatch.setattr(connections, name, 0.5)
    with served(pipe) as address:
        yield address


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def until_end(connection: socket.socket, drip: bytes = b"") -> tuple[bytes, float]:
    """Send `drip` byte by byte and read until the server closes; return what it sent, and the seconds."""
    began, found = time.monotonic(), b""
    connection.settimeout(0.05)
    rest = [drip[place : place + 1] for place in range(len(drip))]
    while time.monotonic() - began < 20:
        try:
            if rest:
                connection.sendall(rest.pop(0))
            part = connection.recv(65536)
            if not part:
                break
            found += part
        except TimeoutError:
            pass
        except ConnectionError:
            break
    return found, time.monotonic() - began


@pytest.mark.parametrize(
    ("start", "drip", "status"),
    [
        (b"", b"", b""),
        (b"G", b"", b"408"),
        (HEAD, b"X-Slow: " + b"a" * 500, b"408"),
        (HALF_BODY, b" " * 500, b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n" * 100, b"408"),
        (HEALTH + b"Content-Length: 5000\r\n\r\n", b" " * 500, b"200"),
        (HALF_BODY.replace(b"json", b"text"), b" " * 500, b"415"),
    ],
    ids=["nothing", "a byte", "header", "body", "chunks", "body of GET", "wrong type"],
)
def test_a_slow_request_is_ended_in_time(start: bytes, drip: bytes, status: bytes, hasty: str) -> None:
    """Also while its bytes arrive one by one."""
    with connected(hasty) as slow:
        slow.sendall(start)
        found, seconds = until_end(slow, drip)
    assert found[9:12] == status
    # Each byte would extend it by 0.05 seconds.
    assert 0.1 < seconds < 12


@pytest.mark.parametrize("rest", [b"zzz\r\n", b"0\r\nzzz\r\n\r\n", b"1\r\n \r\n" * 2000])
def test_what_cannot_be_parsed_is_answered_once(rest: bytes, few: str, capfd: pytest.CaptureFixture[str]) -> None:
    """And not logged. Each small chunk takes as long to parse as some kilobytes, and others would wait meanwhile."""
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    for start, status in ((HEAD + chunked, b"400 Bad Request"), (HEALTH + chunked, b"200 OK")):
        with connected(few) as client:
            client.sendall(start)
            first = client.recv(4096) if start.startswith(HEALTH) else b""
            client.sendall(rest)
            found, seconds = until_end(client)
        assert (first + found).startswith(b"HTTP/1.1 " + status) and seconds < 5
        assert first or (b"is no HTTP/1.1" in found and b"more than 1000 chunks of less than 256 bytes" in found)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("size", "count"), [(1, 1000), (257, 1500)])
def test_other_chunks_are_read(size: int, count: int, few: str) -> None:
    body = json.dumps({**BODY, "max_tokens": 1}).encode().ljust(size * count)
    with httpx.Client(base_url=few, headers={"Content-Type": "application/json"}, timeout=60) as client:
        for _ in range(2):
            pieces = (body[place : place + size] for place in range(0, size * count, size))
            assert client.post("/v1/chat/completions", content=pieces).status_code == 200


def test_a_client_that_takes_no_answer_is_ended_in_time(hasty: str) -> None:
    """The answers of many requests in one piece exceed what the system buffers."""
    with connected(hasty) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(2)
        with contextlib.suppress(OSError):
            for _ in range(400):
                lazy.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        time.sleep(1.5)
        with pytest.raises(ConnectionError):
            while lazy.recv(1 << 20):
                pass
            raise ConnectionResetError("it was closed after the whole answer")


@pytest.mark.parametrize(
    "start",
    [b"", HEAD, HALF_BODY, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", HEALTH + b"Content-Length: 9\r\n\r\n"],
    ids=["nothing", "header", "body", "chunks", "answered"],
)
def test_half_requests_keep_no_other_out(start: bytes, few: str) -> None:
    """More of them than the connections that are allowed, and than `max_queue`."""
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        for _ in range(FEW + 6):
            held.enter_context(connected(few)).sendall(start)
        assert httpx.get(f"{few}/health").status_code == 200
        assert post(few, max_tokens=1).status_code == 200
    assert time.monotonic() - began < 9, "it waited for the end of others"


@pytest.mark.parametrize("many", [b"", HALF_BODY], ids=["idle", "bodies"])
def test_of_many_of_a_kind_the_first_is_closed(many: bytes, few: str) -> None:
    """A connection of the other kind that is older than the last of them gets its answer."""
    body = json.dumps({**BODY, "max_tokens": 1}).encode()
    whole = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    begun = 0 if many else len(whole) - 9
    with contextlib.ExitStack() as held:
        others = [held.enter_context(connected(few)) for _ in range(FEW - 1)]
        for other in others:
            other.sendall(many)
        slow = held.enter_context(connected(few))
        slow.sendall(whole[:begun])
        time.sleep(0.1)
        for number in range(2):
            held.enter_context(connected(few)).sendall(many)
            # Sooner than its time is over.
            others[number].settimeout(5)
            with contextlib.suppress(ConnectionError):
                assert others[number].recv(1) == b""
        slow.sendall(whole[begun:])
        assert slow.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_connection_lives_on_between_requests_and_while_its_answer_takes_long(hasty: str) -> None:
    """Longer than a head may take."""
    with httpx.Client(base_url=hasty) as client:
        for _ in range(5):
            assert client.get("/health").status_code == 200
            assert client.post("/v1/chat/completions", json={**BODY, "max_tokens": 1}).status_code == 200
            time.sleep(0.1)
            [connection] = client._transport._pool.connections  # type: ignore[attr-defined]
            assert connection.is_idle()
    body: dict[str, Any] = {**BODY, "max_tokens": 900, "min_new_tokens": 900, "stream": True}
    began = time.monotonic()
    with httpx.stream("POST", f"{hasty}/v1/chat/completions", json=body, timeout=60) as response:
        *_, last = filter(None, response.iter_lines())
    assert last == "data: [DONE]" and time.monotonic() - began > 0.5


def test_a_full_server_says_so(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections whose requests run are not closed for others."""
    monkeypatch.setattr(connections, "most_connections", lambda max_queue: 1)
    long = {**BODY, "max_tokens": 900, "min_new_tokens": 900, "stream": True}
    with served(pipe) as address:
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=long, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data:")
            with connected(address) as other:
                found, _ = until_end(other)
            assert found.startswith(b"HTTP/1.1 503") and b"requests of 1 connections" in found
            assert next(line for line in lines if line).startswith("data:")

        def accepts() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{address}/health").status_code == 200
            return False

        until(accepts)


def test_a_full_table_of_files_is_one_line_in_the_log(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(pipe) as address, contextlib.ExitStack() as held:
        idle = [held.enter_context(connected(address)) for _ in range(3)]
        httpx.get(f"{address}/health")
        clients = [socket.socket() for _ in range(4)]
        host, port = address.removeprefix("http://").split(":")
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        full = os.dup(0)
        os.close(full)
        resource.setrlimit(resource.RLIMIT_NOFILE, (full, before[1]))
        try:
            for client in clients:
                held.enter_context(client).connect((host, int(port)))
            time.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        # The first connections were closed for those that came.
        assert idle[0].recv(1) == b""
        clients[0].settimeout(10)
        clients[0].sendall(HEALTH + b"\r\n")
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 200")
    log = capfd.readouterr().err
    assert log.count("\n") == 1 and "No connection can be accepted: Too many open files." in log


def test_there_are_fewer_connections_than_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(os.listdir("/dev/fd"))  # noqa: PTH208

    def most(limit: int, queue: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, 4096))
        return connections.most_connections(queue)

    assert (most(2000, 64), most(100_000, 4000)) == (1000, 8000)
    assert 300 - used - 64 < most(300, 64) < 300 - used - 16
    with pytest.raises(UsageError, match=r"files may be open, expected at least .* ulimit -n"):
        most(used + 20, 64)
