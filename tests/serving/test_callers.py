"""Who may send requests to a server without a key: programs and the server's own page, and no other web page."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from tests.serving.test_chat_request import BODY
from tests.serving.test_server import served

from sinkprune import Pipeline
from sinkprune.contract.errors import UsageError
from sinkprune.serving.body_fields import ApiError
from sinkprune.serving.callers import Callers, host_name, origin

OWN = socket.gethostname().lower()


@pytest.fixture(scope="module")
def address(pipe: Pipeline) -> Iterator[str]:
    with served(pipe, host="127.0.0.1", allow_host=("robot.example",), allow_origin=("https://ui.example",)) as it:
        yield it


@pytest.fixture(scope="module")
def guarded(pipe: Pipeline) -> Iterator[str]:
    with served(pipe, host="127.0.0.1", api_key="secret") as address:
        yield address


def refusal(callers: Callers, **headers: str) -> str:
    """Return the sentence with which a request with these headers is refused; "" if it is allowed."""
    try:
        callers.check(Headers(headers))
    except ApiError as error:
        assert error.status == 403 and "or with --api-key" in str(error)
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("host", "name", "allowed"),
    [
        *(("127.0.0.1", name, True) for name in ("LOCALHOST.", "127.0.0.1:1", "[::1]:8000", "127.9.9.9:8000")),
        *(("127.0.0.1", name, False) for name in ("evil.example:80", "10.0.0.5", "localhost.evil.example", OWN)),
        *(("127.0.0.1", name, False) for name in ("", "evil@localhost", "localhost:x", "[::1", "0x7f0001")),
        *(("0.0.0.0", name, True) for name in ("localhost:80", "[FD00::5]:8000", OWN, f"{OWN}.local:8000")),
        *(("0.0.0.0", name, False) for name in ("evil.example", "10.0.0.5.evil.example", "local")),
        *(("Robot.local", name, True) for name in ("robot.local:8000", "10.0.0.5", "localhost")),
        ("robot.local", "evil.local", False),
        ("127.0.0.1", "FURTHER.example:80", True),
        ("127.0.0.1", None, True),
    ],
)
def test_a_foreign_name_of_the_server_is_refused(host: str, name: str | None, allowed: bool) -> None:
    """So a page whose name leads to this machine reads nothing (DNS rebinding)."""
    said = refusal(Callers(host, ["further.example"], []), **({} if name is None else {"host": name}))
    assert said == "" if allowed else "--allow-host NAME" in said


@pytest.mark.parametrize(
    ("page", "allowed"),
    [
        *((page, True) for page in ("http://localhost:8000", "https://localhost:8000", "https://ui.example")),
        *((page, False) for page in ("http://localhost:3000", "http://127.0.0.1:8000", "null", "http://ui.example")),
        *((page, False) for page in ("http://localhost:80001", "http://localhost:8000.evil.example", "")),
        ("localhost:8000", False),
    ],
)
def test_a_foreign_page_is_refused(page: str, allowed: bool) -> None:
    said = refusal(Callers("127.0.0.1", [], ["https://ui.example"]), host="localhost:8000", origin=page)
    assert said == "" if allowed else "--allow-origin ORIGIN" in said


FOREIGN: list[dict[str, str]] = [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/m", "/v1/chat/completions"])
def test_every_path_is_for_known_callers(path: str, address: str, guarded: str) -> None:
    port = address.rpartition(":")[2]
    own: list[dict[str, str]] = [{}, {"Host": "robot.example"}, {"Origin": address}, {"Host": f"localhost:{port}"}]

    def status(address: str, headers: dict[str, str]) -> int:
        body = {**BODY, "max_tokens": 1} if path == "/v1/chat/completions" else None
        method = "POST" if body else "GET"
        return httpx.request(method, address + path, json=body, headers=headers, timeout=60).status_code

    assert [status(address, headers) for headers in own] == [200] * 4
    assert [status(address, headers) for headers in FOREIGN] == [403] * 3
    # No foreign page has the key.
    key = {"Authorization": "Bearer secret"}
    assert [status(guarded, {**headers, **key}) for headers in FOREIGN] == [200] * 3


def test_a_page_of_an_allowed_origin_reads_answers(address: str) -> None:
    """With what a browser sends first, and with errors."""
    page = {"Origin": "https://ui.example"}
    asking = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type,x-stainless-os",
    }
    url = f"{address}/v1/chat/completions"
    first = httpx.options(url, headers={**page, **asking})
    assert (first.status_code, first.headers["access-control-allow-origin"]) == (200, "https://ui.example")
    assert "x-stainless-os" in first.headers["access-control-allow-headers"]
    for body, status in ((BODY, 200), ({**BODY, "n": 2}, 400)):
        found = httpx.post(url, json=body, headers=page, timeout=60)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (status, "https://ui.example")
    foreign = httpx.options(url, headers={**asking, "Origin": "http://evil.example"})
    assert foreign.status_code == 400 and "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        *((kind, 200) for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON ;a=b")),
        *((kind, 415) for kind in ("text/plain", "application/x-www-form-urlencoded", "", None)),
        *((kind, 415) for kind in ("multipart/form-data", "text/plain; application/json", "application/jsonp")),
    ],
)
def test_a_body_is_sent_as_json(kind: str | None, status: int, address: str) -> None:
    """A browser sends some of the other types, and none, for a foreign page without a question."""
    body = json.dumps({**BODY, "max_tokens": 1})
    headers: Any = {} if kind is None else {"Content-Type": kind}
    found = httpx.post(f"{address}/v1/chat/completions", content=body.encode(), headers=headers, timeout=60)
    assert found.status_code == status
    assert status == 200 or "Send the header Content-Type: application/json." in found.text


@pytest.mark.parametrize(
    ("check", "words", "said"),
    [
        (host_name, ["", "a:80", "http://a", "a/b", "*.a", "[::1]", "a b", "a@b"], "--allow-host is "),
        (origin, ["", "*", "null", "robot.example", "https://", "https://a/", "https://*.a"], "--allow-origin is "),
    ],
)
def test_wrong_options_are_refused(check: Callable[[str], str], words: list[str], said: str) -> None:
    for word in words:
        with pytest.raises(UsageError, match=said):
            check(word)
