"""Thousands of requests with random pictures and budgets, of clients that may go away: memory stays, and all end."""

from __future__ import annotations

import json
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.runtime.server.test_server import asked

from support.programs.commands import own_process

REQUESTS, CLIENTS = 10_000, 8


def resident_bytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def server(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the address and the process of a server, which has no client in its memory."""
    limits = ("--session-mb", 4, "--threads", 1, "--name", "m")
    words = own_process("sinkprune-serve", path, "--port", 0, "--json", *limits)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield json.loads(running.stdout.readline())["url"], running.pid
        finally:
            running.terminate()


@pytest.mark.slow
def test_memory_stays_and_nothing_is_stuck(bundle: Callable[..., Path]) -> None:
    path = bundle("gqa-112", "fp32", ("retain-64", "retain-192"))
    budgets = ["none", "retain-64", "retain-192"]
    grown = []
    with server(path) as (address, process):

        def client(number: int) -> None:
            rng = np.random.default_rng(number)
            with httpx.Client(base_url=address, timeout=60) as http:
                for _ in range(REQUESTS // CLIENTS // 10):
                    side = rng.integers(20, 90, 2)
                    picture = Image.fromarray(rng.integers(0, 256, (*side, 3), dtype=np.uint8))
                    body = {
                        "model": f"m:{budgets[rng.integers(3)]}",
                        "messages": asked(picture, "What is it?"),
                        "max_tokens": int(rng.integers(1, 12)),
                        "stream": bool(rng.integers(2)),
                        "priority": int(rng.integers(3)),
                    }
                    with http.stream("POST", "/chat/completions", json=body) as response:
                        assert response.status_code == 200
                        if rng.random() < 0.1:
                            # The client goes away.
                            continue
                        response.read()

        for part in range(10):
            with ThreadPoolExecutor(CLIENTS) as clients:
                for _ in clients.map(client, range(part * CLIENTS, (part + 1) * CLIENTS)):
                    pass
            grown.append(resident_bytes(process))
        until = time.monotonic() + 30
        while any(f"sinkprune_{state} 0.0" not in metrics(address) for state in ("waiting", "active")):
            assert time.monotonic() < until
    # From the second tenth on, when pools and the session are full.
    assert max(grown[1:]) - grown[1] < 15 << 20, [size >> 20 for size in grown]


def metrics(address: str) -> str:
    return httpx.get(address.replace("/v1", "/metrics")).text
