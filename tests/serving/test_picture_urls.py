"""Pictures that a server fetches: from public addresses only, without redirects, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from PIL import Image
from tests.serving.test_chat_request import BODY, png
from tests.serving.test_server import post, served, until

from sinkprune import Pipeline
from sinkprune.serving import picture_urls
from sinkprune.serving.body_fields import ApiError
from sinkprune.serving.picture_urls import PictureReader, fetch_https

HOST, PNG = "pictures.example", png(Image.new("RGB", (8, 6), "red"))
OK = b"HTTP/1.1 200 OK\r\n"
SILENT: list[str] = []
"""The requests that get no answer."""


def certificate(folder: Path) -> Path:
    """Write a certificate of `HOST` and its key into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    own = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, *form)
    file = folder / "certificate.pem"
    file.write_bytes(pem + own.sign(key, SHA256()).public_bytes(serialization.Encoding.PEM))
    return file


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ANSWERS: dict[str, list[bytes]] = {
    "/a.png": [OK, b"Content-Length: %d\r\n\r\n" % len(PNG), PNG],
    "/chunked": [OK, CHUNKED, *(b"1\r\n%c\r\n" % byte for byte in PNG), b"0\r\n\r\n"],
    "/until-end": [OK, b"\r\n", PNG],
    "/interim": [b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" * 2, OK, b"\r\n", PNG],
    "/text": [OK, b"\r\nhello"],
    "/large": [OK, b"\r\n", b"x" * 3000],
    "/moved": [b"HTTP/1.1 302 Found\r\nLocation: /a.png\r\n\r\n"],
    "/none": [b"HTTP/1.1 404 No\r\n\r\n"],
    "/short": [OK, b"Content-Length: 10000\r\n\r\n", PNG],
    "/no-http": [b"220 ready\r\n"],
}
ENDLESS: dict[str, tuple[bytes, bytes, float]] = {
    "/small-chunks": (OK + CHUNKED, b"1\r\na\r\n" * 1000, 0),
    "/interim-without-end": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0),
    "/slow-body": (OK + b"Content-Length: 900\r\n\r\n", b"a", 0.05),
    "/slow-chunks": (OK + CHUNKED, b"1\r\na\r\n", 0.05),
    "/slow-head": (OK + b"A: ", b"a", 0.05),
    "/silent": (b"", b"", 0.05),
}
"""What is sent first, what again and again, and the seconds between."""


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            path = self.rfile.readline().split()[1].decode().partition("?")[0]
            while self.rfile.readline().strip():
                pass
            SILENT.extend([path] * (path == "/silent"))
            first, again, seconds = ENDLESS.get(path, (b"".join(ANSWERS.get(path, ANSWERS["/a.png"])), b"", 0.0))
            self.wfile.write(first)
            while path in ENDLESS:
                time.sleep(seconds)
                self.wfile.write(again)


def fetch(url: str) -> bytes:
    return asyncio.run(fetch_https(url))


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Yield the address of a server on this machine, with TLS, as if it were public."""
    file = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)

    async def address(host: str, port: int) -> str:
        return "127.0.0.1"

    monkeypatch.setattr(picture_urls, "_tls", lambda: ssl.create_default_context(cafile=file))
    monkeypatch.setattr(picture_urls, "_public_address", address)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://{HOST}:{server.server_address[1]}"
        server.shutdown()


def test_a_picture_is_fetched(web: str, pipeline: Callable[..., Pipeline]) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",))
    for path in ("/a.png?size=1", "/chunked", "/until-end", "/interim"):
        assert fetch(web + path) == PNG
    reader = PictureReader(pipe.family, fetch)
    assert reader.image(f"{web}/a.png", "it").decoded().size == (8, 6)
    with pytest.raises(ApiError, match="no known format"):
        reader.image(f"{web}/text", "it")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        *(("/moved", "answered 302"), ("/none", "answered 404"), ("/large", "more than 2000 bytes")),
        *(("/interim-without-end", "interim responses without end"), ("/short", "could not be fetched")),
        ("/small-chunks", "could not be fetched: too many small chunks"),
        *((path, "could not be fetched") for path in ("/no-http", "/a b", "/\u00e4")),
    ],
)
def test_what_is_no_picture_within_limits_is_refused(
    path: str, said: str, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_urls, "MOST_REMOTE_BYTES", 2000)
    with pytest.raises(ApiError, match=said):
        fetch(web + path)


@pytest.mark.parametrize("path", ["/slow-body", "/slow-chunks", "/slow-head", "/silent"])
def test_a_picture_has_a_time_for_the_whole(path: str, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_urls, "_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(ApiError, match=r"not fetched within 0\.3 seconds"):
        fetch(web + path)
    assert time.monotonic() - began < 9


def test_a_certificate_is_checked(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_urls, "_tls", ssl.create_default_context)
    with pytest.raises(ApiError, match="certificate verify failed"):
        fetch(f"{web}/a.png")


def test_slow_pictures_keep_no_other_request_out(
    web: str, pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many requests with such pictures as `max_queue`, and others whose clients have left."""
    # A busy machine may need more than ten seconds for the requests beside them.
    monkeypatch.setattr(picture_urls, "_SECONDS", 120.0)
    parts = [{"type": "image_url", "image_url": {"url": f"{web}/silent"}}, {"type": "text", "text": "What?"}]
    slow = [{"role": "user", "content": parts}]
    SILENT.clear()
    with (
        ThreadPoolExecutor(4) as threads,
        served(pipeline("gqa-112", "fp32", ("retain-64",)), allow_remote_images=True, max_queue=4) as address,
    ):
        for number in range(3):
            with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
                url = f"{address}/v1/chat/completions"
                client.post(url, json={**BODY, "messages": slow}, timeout=httpx.Timeout(60, read=0.2))
            ended = f'sinkprune_requests_total{{status="499"}} {number + 1}.0'
            until(lambda ended=ended: ended in httpx.get(f"{address}/metrics").text)  # type: ignore[misc]
        SILENT.clear()
        waiting = [threads.submit(post, address, messages=slow) for _ in range(4)]
        until(lambda: len(SILENT) == 4)
        assert post(address, max_tokens=1).status_code == 200
        assert not any(one.done() for one in waiting)
    # The end waits for no picture.
    assert [one.result().status_code for one in waiting] == [503] * 4


@pytest.mark.parametrize(
    "addresses",
    [
        *(["127.0.0.1"], ["10.1.2.3"], ["192.168.0.7"], ["172.16.5.4"], ["169.254.169.254"], ["0.0.0.0"]),
        *(["::1"], ["fe80::1%eth0"], ["fc00::5"], ["::ffff:127.0.0.1"], ["100.64.0.1"], ["224.0.0.1"]),
        ["93.184.216.34", "10.0.0.1"],
        # Through gateways: NAT64 (RFC 6052, RFC 8215), 6to4, Teredo, and old forms.
        *(["64:ff9b::127.0.0.1"], ["64:ff9b::a00:1"], ["64:ff9b:1::808:808"], ["2002:7f00:1::"], ["2002:a00:1::5"]),
        *(["2001:0:808:808::f5ff:fffe"], ["::ffff:10.0.0.1"], ["::127.0.0.1"], ["::ffff:0:127.0.0.1"], ["fec0::1"]),
    ],
)
def test_private_addresses_are_refused_before_a_connection(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: int, **kind: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    async def connect(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(ApiError, match="private network"):
        fetch("https://looks.public.example/a.png")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800::1", "64:ff9b::808:808", "::ffff:8.8.8.8"])
def test_it_connects_to_the_address_that_was_checked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lookup may return another address."""
    answers = iter([[address], ["127.0.0.1"]])
    connected = []

    def lookup(host: str, port: int, **kind: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers)]

    async def connect(host: str, port: int, **options: Any) -> None:
        connected.append((host, port, options["server_hostname"]))
        raise OSError("enough")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(ApiError, match="could not be fetched: enough"):
        fetch("https://rebinding.example/a.png")
    assert connected == [(address, 443, "rebinding.example")]


def test_the_lookup_of_a_name_takes_no_longer_than_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Event()

    def lookup(*arguments: Any, **options: Any) -> list[Any]:
        released.wait(20)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(picture_urls, "_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(ApiError, match="not fetched within"):
        fetch("https://slow.example/")
    assert time.monotonic() - began < 9
    released.set()


@pytest.mark.parametrize("url", ["https://", "https://[::1", "https://host:99999999/", "https://a b/", "https://\0/"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ApiError):
        fetch(url)
