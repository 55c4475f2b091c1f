"""Pictures that a server fetches: from public addresses only, without redirects, within limits."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from PIL import Image
from tests.runtime.server.test_chat_request import data_uri

from sinkprune import Pipeline
from sinkprune.runtime.server import picture_urls
from sinkprune.runtime.server.api_error import ApiError
from sinkprune.runtime.server.picture_urls import PictureReader, fetch_https


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(file, "PNG")
    return file.getvalue()


@contextmanager
def web_server() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response({"/moved": 302, "/none": 404}.get(self.path, 200))
            if self.path == "/moved":
                self.send_header("Location", "https://127.0.0.1/secret")
            self.end_headers()
            self.wfile.write({"/large": b"x" * 3000, "/text": b"hello"}.get(self.path, png()))

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


class PlainConnection(HTTPConnection):
    """In the place of the TLS connection: it connects to the address that was checked, without a certificate."""

    def __init__(self, host: str, port: int, address: str) -> None:
        super().__init__(address, port, timeout=5)


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], bytes]]:
    """Fetch from a server on this machine, as if its address were public."""
    with web_server() as port:
        monkeypatch.setattr(picture_urls, "_CheckedConnection", PlainConnection)
        monkeypatch.setattr(picture_urls, "_public_address", lambda host, port: "127.0.0.1")
        yield lambda path: fetch_https(f"https://pictures.example:{port}{path}")


def test_a_picture_is_fetched(fetch: Callable[[str], bytes], pipeline: Callable[..., Pipeline]) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",))
    assert fetch("/a.png?size=1") == png()
    reader = PictureReader(pipe.family, lambda url: fetch(url.removeprefix("https://x")))
    assert reader.image("https://x/a.png").size == (8, 6)
    with pytest.raises(ApiError, match="no known format"):
        reader.image("https://x/text")


def test_a_picture_that_the_model_rejects_is_refused_before_its_request(pipeline: Callable[..., Pipeline]) -> None:
    pipe = pipeline("qwen-tied", "fp32", ("prune-66.7",))
    reader = PictureReader(pipe.family, None)
    with pytest.raises(ApiError, match="1x5000") as refused:
        reader.image(data_uri(Image.new("RGB", (1, 5000))))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("path", "said"), [("/moved", "answered 302"), ("/none", "answered 404"), ("/large", "more than 2000 bytes")]
)
def test_what_is_no_picture_within_limits_is_refused(
    path: str, said: str, fetch: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_urls, "MOST_REMOTE_BYTES", 2000)
    with pytest.raises(ApiError, match=said):
        fetch(path)


@pytest.mark.parametrize(
    "addresses",
    [
        *(["127.0.0.1"], ["10.1.2.3"], ["192.168.0.7"], ["172.16.5.4"], ["169.254.169.254"], ["0.0.0.0"]),
        *(["::1"], ["fe80::1%eth0"], ["fc00::5"], ["::ffff:127.0.0.1"], ["100.64.0.1"], ["224.0.0.1"]),
        ["93.184.216.34", "10.0.0.1"],
    ],
)
def test_private_addresses_are_refused_before_a_connection(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: int, **kind: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    def connect(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ApiError, match="private network"):
        fetch_https("https://looks.public.example/a.png")


def test_it_connects_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second lookup may return another address."""
    answers = iter([["93.184.216.34"], ["127.0.0.1"]])
    connected = []

    def lookup(host: str, port: int, **kind: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers)]

    def connect(address: tuple[str, int], *rest: Any) -> socket.socket:
        connected.append(address)
        raise OSError("enough")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(ApiError, match="could not be fetched: enough"):
        fetch_https("https://rebinding.example/a.png")
    assert connected == [("93.184.216.34", 443)]


@pytest.mark.parametrize("url", ["https://", "https://[::1", "https://host:99999999/", "https://a b/", "https://\0/"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ApiError):
        fetch_https(url)
