"""Thousands of requests of every kind, of clients that may go away: memory stays, and all end."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.serving.test_server import asked, until
from tests.serving.test_server_tools import NAMED, TOOLS

# 20,000 take longer than the suite's limit for a test: SOAK_REQUESTS=20000 pytest -m slow -o faulthandler_timeout=0
REQUESTS, CLIENTS = int(os.environ.get("SOAK_REQUESTS", "6000")), 8
BUDGETS = ("prune-66.7", "prune-88.9")


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


def fields(rng: np.random.Generator) -> tuple[dict[str, Any], bool]:
    """Return the fields of a request of a random kind, most with a form of its own, and whether it is wrong."""
    number = int(rng.integers(10**6))
    right: list[dict[str, Any]] = [
        {},
        {"guided_json": {"enum": [number, None, {"a": number}]}, "max_tokens": 120},
        {"guided_regex": f"{number}[0-9]{{1,3}}", "max_tokens": 20},
        {"guided_choice": [f"a{number}", f"b{number}", "c"]},
        {"tools": TOOLS, "tool_choice": ["auto", "none", "required", NAMED][number % 4]},
        {"kept_tokens": True, "session": False},
        {"logprobs": True, "top_logprobs": number % 4},
        {"temperature": 1.5, "top_p": 0.9, "seed": number, "stop": "abcdefgh"[number % 8]},
    ]
    wrong: list[dict[str, Any]] = [
        {"budget": "retain-0"},
        {"guided_json": {"uniqueItems": True}},
        {"messages": [{"role": "user", "content": "very " * 3000}]},
    ]
    kind = int(rng.integers(len(right) + len(wrong)))
    return [*right, *wrong][kind], kind >= len(right)


def ask(http: httpx.Client, rng: np.random.Generator) -> None:
    """Send a random request, and check how it ended, unless the client goes away."""
    picture = Image.fromarray(rng.integers(0, 256, (*rng.integers(80, 200, 2), 3), dtype=np.uint8))
    changes, wrong = fields(rng)
    body: dict[str, Any] = {
        "model": f"m:{['none', *BUDGETS][rng.integers(3)]}",
        "messages": asked(picture, "What is it?"),
        "max_tokens": int(rng.integers(1, 12)),
        "stream": bool(rng.integers(2)),
        "priority": int(rng.integers(3)),
        **changes,
    }
    goes_away = rng.random() < 0.2
    patience = httpx.Timeout(60, read=rng.uniform(0.001, 0.1) if goes_away else 60)
    try:
        text = http.post("/chat/completions", json=body, timeout=patience).text
    except httpx.ReadTimeout:
        assert goes_away, body
        return
    assert ('"error"' in text) is wrong, text
    assert wrong or not body["stream"] or text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
def test_memory_stays_and_nothing_is_stuck(bundle: Callable[..., Path]) -> None:
    path, grown = bundle("qwen-tools", "fp32", BUDGETS), list[int]()
    with server(path) as (address, process):

        def client(number: int) -> None:
            rng = np.random.default_rng(number)
            with httpx.Client(base_url=address) as http:
                for _ in range(REQUESTS // CLIENTS // 10):
                    ask(http, rng)

        def metrics() -> str:
            return httpx.get(address.replace("/v1", "/metrics")).text

        for part in range(10):
            with ThreadPoolExecutor(CLIENTS) as clients:
                list(clients.map(client, range(part * CLIENTS, (part + 1) * CLIENTS)))
            grown.append(resident_bytes(process))
        until(lambda: all(f"sinkprune_{state} 0.0" in metrics() for state in ("waiting", "active")), 30)
    # From the first tenth on, when pools and the session are full.
    assert max(grown) - grown[0] < 50 << 20, [size >> 20 for size in grown]
