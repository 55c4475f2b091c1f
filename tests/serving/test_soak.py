"""Thousands of requests of every kind, of clients that may go away: memory stays, all end, and forms are kept."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
from PIL import Image
from tests.serving.test_server import asked
from tests.serving.test_server_tools import NAMED, TOOLS

# 20,000 take longer than the suite's limit for a test: SOAK_REQUESTS=20000 pytest -m slow -o faulthandler_timeout=0
REQUESTS, CLIENTS = int(os.environ.get("SOAK_REQUESTS", "6000")), 8
BUDGETS = ("prune-66.7", "prune-88.9")
WRONG: list[dict[str, Any]] = [
    {"model": "other"},
    {"budget": "retain-0"},
    {"max_tokens": 0},
    {"unheard": 1},
    {"guided_json": {"uniqueItems": True}},
    {"guided_regex": "("},
    {"guided_choice": ["a", "a"]},
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
    {"messages": [{"role": "user", "content": "very " * 3000}]},
]


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def server(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a server, which has no client in its memory, and collects no cycles."""
    limits = ("--session-mb", 4, "--threads", 1, "--name", "m")
    program = "import gc, sys; gc.disable(); from sinkprune.serving.command import main; main()"
    words = [sys.executable, "-c", program, *map(str, (path, "--port", 0, "--json", *limits))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield json.loads(running.stdout.readline())["url"], running.pid
        finally:
            running.terminate()


def fields(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return the fields of the body that make a request of this kind, most with a form of its own."""
    number = int(rng.integers(10**6))
    match kind:
        case "schema":
            parts = {"a": {"enum": [number, None]}, "b": {"type": "string", "pattern": f"^{number}[a-c]$"}}
            schema = {"type": "object", "properties": parts, "required": ["a", "b"], "additionalProperties": False}
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            return {"response_format": form, "max_tokens": 120}
        case "regex":
            return {"guided_regex": f"{number}[0-9]{{1,3}}", "max_tokens": 20}
        case "choice":
            return {"guided_choice": [f"a{number}", f"b{number}", "c"]}
        case "tools":
            return {"tools": TOOLS, "tool_choice": ["auto", "none", "required", NAMED][number % 4]}
        case "kept tokens":
            return {"kept_tokens": True, "session": False}
        case "logprobs":
            return {"logprobs": True, "top_logprobs": number % 4}
        case "sampled":
            return {"temperature": 1.5, "top_p": 0.9, "seed": number, "stop": "abcdefgh"[number % 8]}
        case "wrong":
            return WRONG[number % len(WRONG)]
    return {}


KINDS = ("plain", "schema", "regex", "choice", "tools", "kept tokens", "logprobs", "sampled", *["wrong"] * 4)


def check_form(body: dict[str, Any], found: dict[str, Any]) -> None:
    """Check that a whole answer has the form that its request asked for."""
    [choice] = found["choices"]
    text = choice["message"]["content"]
    if "guided_choice" in body:
        assert text in body["guided_choice"]
    if "response_format" in body and choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(text), body["response_format"]["json_schema"]["schema"])
    if "kept_tokens" in body:
        assert len(found["sinkprune"]["kept_tokens"]) == 1


def ask(http: httpx.Client, rng: np.random.Generator) -> str:
    """Send a random request, and return how it ended: whole, gone or wrong."""
    kind = KINDS[rng.integers(len(KINDS))]
    side = rng.integers(80, 200, 2)
    picture = Image.fromarray(rng.integers(0, 256, (*side, 3), dtype=np.uint8))
    body: dict[str, Any] = {
        "model": f"m:{['none', *BUDGETS][rng.integers(3)]}",
        "messages": asked(picture, "What is it?"),
        "max_tokens": int(rng.integers(1, 12)),
        "stream": bool(rng.integers(2)),
        "priority": int(rng.integers(3)),
        **fields(kind, rng),
    }
    goes_away = rng.random() < 0.2
    patience = httpx.Timeout(60, read=rng.uniform(0.001, 0.1) if goes_away else 60)
    try:
        with http.stream("POST", "/chat/completions", json=body, timeout=patience) as response:
            if kind == "wrong":
                message = json.loads(response.read())["error"]["message"]
                assert 400 <= response.status_code < 500 and "\n" not in message
                return "wrong"
            assert response.status_code == 200, response.read()
            if goes_away:
                return "gone"
            text = response.read().decode()
            if body["stream"]:
                assert text.endswith("data: [DONE]\n\n") and "error" not in json.loads(text.split("data: ")[-2])
            else:
                check_form(body, json.loads(text))
            return "whole"
    except httpx.ReadTimeout:
        assert goes_away, body
        return "gone"


@pytest.mark.slow
def test_memory_stays_and_nothing_is_stuck(bundle: Callable[..., Path]) -> None:
    path = bundle("qwen-tools", "fp32", BUDGETS)
    grown, ended = [], dict.fromkeys(("whole", "gone", "wrong"), 0)
    with server(path) as (address, process):

        def client(number: int) -> list[str]:
            rng = np.random.default_rng(number)
            with httpx.Client(base_url=address) as http:
                return [ask(http, rng) for _ in range(REQUESTS // CLIENTS // 10)]

        for part in range(10):
            began = time.monotonic()
            with ThreadPoolExecutor(CLIENTS) as clients:
                for ends in clients.map(client, range(part * CLIENTS, (part + 1) * CLIENTS)):
                    for end in ends:
                        ended[end] += 1
            assert httpx.get(address.removesuffix("/v1")).status_code == 200
            grown.append(resident_bytes(process))
            # pytest -s shows it.
            took = time.monotonic() - began
            sys.stdout.write(f"{sum(ended.values())} {ended} {grown[-1] >> 20} MiB {took:.0f} s\n")
            sys.stdout.flush()
        until = time.monotonic() + 30
        while any(f"sinkprune_{state} 0.0" not in metrics(address) for state in ("waiting", "active")):
            assert time.monotonic() < until
    # From the first tenth on, when pools and the session are full.
    assert max(grown) - grown[0] < 50 << 20, [size >> 20 for size in grown]


def metrics(address: str) -> str:
    return httpx.get(address.replace("/v1", "/metrics")).text
