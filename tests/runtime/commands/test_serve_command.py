"""`sinkprune-serve`: a server in its own process, and what it refuses before it loads a model."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from tests.serving.test_chat_request import BODY

from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend
from sinkprune.serving import command as serve
from support.programs.commands import assert_refused, own_process, run, succeed


@contextmanager
def started(
    path: Path, where: Path, *words: object
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any], list[str]]]:
    """A server in a process of its own, what it writes to `where`, and the lines that it prints at first."""
    command = own_process("sinkprune-serve", path, "--port", 0, "--json", where, *words)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = [""]
            while "answers at" not in lines[-1]:
                lines.append(server.stderr.readline())
                assert lines[-1], server.wait()
            yield server, json.loads(where.read_text()), lines[1:]
            assert (server.wait(timeout=30), server.stderr.read()) == (0, "The server has ended.\n")
        finally:
            server.kill()


def test_it_answers_until_it_is_interrupted(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """With a bundle that lacks the default method."""
    path = tmp_path / "bundle"
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",), methods=("fastervlm",)), path)
    assert_refused(run("sinkprune-serve", path), "no method 'sinkpruner'", "holds: fastervlm. Give one of these")
    words = ("--name", "robot", "--method", "fastervlm", "--budget", "retain-64")
    with started(path, tmp_path / "server.json", *words) as (server, written, (note, _, line)):
        assert note.startswith("note: of a picture of 640x480 pixels, the model sees 75 %")
        found = re.match(r"robot answers at (http://127\.0\.0\.1:\d+)/v1\. ", line)
        assert found is not None
        assert written == {"url": f"{found[1]}/v1", "models": ["robot", "robot:none", "robot:retain-64"]}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json={**BODY, "model": "robot"}, timeout=60).json()
        assert (answer["sinkprune"]["method"], answer["sinkprune"]["budget"]) == ("fastervlm", "retain-64")
        assert "<title>" in httpx.get(f"{found[1]}/").text
        server.send_signal(signal.SIGINT)


@pytest.mark.parametrize(("drain_s", "complete"), [(60, True), (0, False)])
def test_sigterm_lets_running_requests_end_in_time(
    drain_s: int, complete: bool, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    path = bundle("gqa-112", "fp32", ("retain-64",))
    tokens = {"max_tokens": 900, "min_new_tokens": 900}
    with started(path, tmp_path / "server.json", "--drain-s", drain_s) as (server, found, _):
        body = {**BODY, "model": found["models"][0], **tokens, "stream": True}
        with httpx.stream("POST", f"{found['url']}/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data:")
            server.send_signal(signal.SIGTERM)
            *_, last = filter(None, lines)
        assert last == "data: [DONE]" if complete else "the server is shutting down" in last


def test_the_end_waits_for_no_body(bundle: Callable[..., Path], tmp_path: Path) -> None:
    """A body that arrives slowly gets 503, and a rejected one its error, when the time to drain is over."""
    path = bundle("gqa-112", "fp32", ("retain-64",))
    with started(path, tmp_path / "server.json", "--drain-s", 1) as (server, found, _):
        address = (urlsplit(found["url"]).hostname, urlsplit(found["url"]).port)
        with socket.create_connection(address) as slow, socket.create_connection(address) as lost:
            for connection, target in ((slow, "/v1/chat/completions"), (lost, "/nothing")):
                head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            # Until both bodies are being read.
            time.sleep(0.5)
            began = time.monotonic()
            server.send_signal(signal.SIGTERM)
            answers = [HTTPResponse(connection) for connection in (slow, lost)]
            for answer in answers:
                answer.begin()
            assert [answer.status for answer in answers] == [503, 404]
            assert "the server is shutting down" in json.load(answers[0])["error"]["message"]
            assert 0.9 < time.monotonic() - began < 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_right_after_the_address_ends_it_too(number: int, bundle: Callable[..., Path]) -> None:
    """Before uvicorn takes signals over."""
    words = own_process("sinkprune-serve", bundle("gqa-112", "fp32", ("retain-64",)), "--port", 0, "--json")
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "http://" in server.stdout.readline()
            server.send_signal(number)
            _, errors = server.communicate(timeout=30)
        finally:
            server.kill()
    assert server.returncode == 0 and "Traceback" not in errors
    assert errors.endswith(" Ctrl-C ends it.\nThe server has ended.\n")


def test_engines_that_take_no_later_rows_are_served_without_a_session(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TensorRT's of dialect opset20, the only ones of JetPack 6."""

    async def end(_: object) -> None:
        return

    monkeypatch.setattr(uvicorn.Server, "main_loop", end)
    monkeypatch.setattr(OrtBackend, "resumes", False)
    words = ("sinkprune-serve", bundle("gqa-112", "fp32", ("retain-64",)), "--port", 0)
    for options, told in (((), True), (("--session-mb", 0), False)):
        outcome = succeed(*words, *options)
        assert ("note: nothing is kept between requests (--session-mb), because" in outcome.stderr) == told


def test_a_missing_package_is_named_with_its_extra(bundle: Callable[..., Path]) -> None:
    program = (
        "import sys; sys.modules['starlette'] = None; from sinkprune.serving.command import main; "
        "raise SystemExit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, bundle("gqa-112", "fp32", ("retain-64",))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "pip install --editable '.[server]'" in done.stderr, done
    assert done.stderr.startswith("error: the server needs the package 'starlette"), done


def test_wrong_options_are_refused(bundle: Callable[..., Path]) -> None:
    path = bundle("gqa-112", "fp32", ("retain-64",))
    assert_refused(run("sinkprune-serve", path / "none"), "no folder")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option, value, said in (
            ("--budget", "retain-63", "retain-63"),
            ("--name", "a:b", "without ':'"),
            *((f"--max-{what}", 0, f"--max-{what} is 0, expected") for what in ("queue", "active", "body-mb")),
            *((option, -1, f"{option} is -1, expected") for option in ("--session-mb", "--drain-s")),
            ("--port", port, f"cannot listen at 127.0.0.1, port {port}"),
            ("--host", "no.such.host.invalid", "cannot listen at no.such.host"),
        ):
            assert_refused(run("sinkprune-serve", path, option, value), said)


def test_a_wrong_key_starts_no_open_server(bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle("gqa-112", "fp32", ("retain-64",))
    # Otherwise a server would start, and the test would not end.
    monkeypatch.delattr(serve, "load_app")
    for key, said in (("", "is empty"), ("schlüssel", "printable ASCII"), ("a\n", "printable"), (" a", "printable")):
        assert_refused(run("sinkprune-serve", path, "--api-key", key), "--api-key ", said)
        monkeypatch.setenv("SINKPRUNE_API_KEY", key)
        assert_refused(run("sinkprune-serve", path), "the environment variable SINKPRUNE_API_KEY", said)
