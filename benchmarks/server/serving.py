"""Measures the times that clients of `sinkprune-serve` see: over HTTP, in a session, and with priority under load.

    python benchmarks/server/serving.py demo-output/bundle
    python benchmarks/server/serving.py bundle --budget retain-64 --rounds 9 --streams 8 --json serving.json

The server runs in its own process. Every round asks, in turn: a first question about a new random picture, a second
question about it, and, while `--streams` other answers are being generated, a first question with priority. The
client's time ends with the first event that has text. The table has medians and ranges.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import numpy as np
from PIL import Image

from sinkprune.contract.child_processes import python_command
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.files.output_files import check_outputs

FIRST, SECOND = "What colour is the object in the middle?", "How many objects are there?"
LONG_TOKENS = 400


def picture(rng: np.random.Generator) -> str:
    """Return a random picture of 640x480 pixels as a data URI."""
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (480, 640, 3), dtype=np.uint8)).save(file, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def body(model: str, url: str, question: str, **options: Any) -> dict[str, Any]:
    """Return a streamed request."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"model": model, "messages": [{"role": "user", "content": parts}], "stream": True, **options}


def first_event_ms(client: httpx.Client, request: dict[str, Any]) -> tuple[float, float]:
    """Return milliseconds until the first text, by the client's clock and by the server's `ttft`."""
    began, first = time.perf_counter(), None
    with client.stream("POST", "/chat/completions", json=request) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = time.perf_counter() - began if first is None else first
            chunk = json.loads(line.removeprefix("data: "))
            if "sinkprune" in chunk:
                server = float(chunk["sinkprune"]["ms"]["ttft"])
    assert first is not None
    return first * 1e3, server


@contextmanager
def served(bundle: Path, options: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the address and the models of a server in its own process."""
    program = "from sinkprune.entry_points import serve; sys.exit(serve())"
    command = python_command(program, str(bundle), "--port", "0", "--json", *options)
    # In a session of its own, because the scheduler shares processor time between sessions.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())
        finally:
            server.terminate()


@contextmanager
def load(url: str, model: str, streams: int) -> Iterator[None]:
    """Keep so many long answers streaming while the block runs."""
    ends, started = Event(), [Event() for _ in range(streams)]
    pictures = [picture(np.random.default_rng(1000 + number)) for number in range(streams)]

    def stream(number: int) -> None:
        long = {"max_tokens": LONG_TOKENS, "min_new_tokens": LONG_TOKENS}
        with httpx.Client(base_url=url, timeout=600) as client:
            while not ends.is_set():
                request = body(model, pictures[number], FIRST, **long)
                with client.stream("POST", "/chat/completions", json=request) as response:
                    for _ in response.iter_lines():
                        started[number].set()
                        if ends.is_set():
                            break

    threads = [Thread(target=stream, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        for event in started:
            event.wait(600)
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def measure(url: str, model: str, rounds: int, streams: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round by what was measured; a round before them does not count."""
    rng, found = np.random.default_rng(0), dict[str, list[float]]()

    def add(name: str, values: tuple[float, float]) -> None:
        for clock, value in zip(("client", "server"), values, strict=True):
            found.setdefault(f"{name}, {clock}", []).append(value)

    with httpx.Client(base_url=url, timeout=600) as client:
        for _ in range(rounds + 1):
            shown = picture(rng)
            add("first question", first_event_ms(client, body(model, shown, FIRST, max_tokens=4)))
            add("second question", first_event_ms(client, body(model, shown, SECOND, max_tokens=4)))
            with load(url, model, streams):
                urgent = body(model, picture(rng), FIRST, max_tokens=4, priority=5)
                add(f"with priority, {streams} streams", first_event_ms(client, urgent))
    return {name: values[1:] for name, values in found.items()}


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--backend", default="ort-cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    with served(options.bundle, ["--backend", options.backend, "--budget", options.budget]) as server:
        found = measure(server["url"], server["models"][0], options.rounds, options.streams)
    base = statistics.median(found["first question, client"])
    for name, values in found.items():
        middle = statistics.median(values)
        spread = f"({min(values):.1f} to {max(values):.1f})"
        sys.stdout.write(f"{name:40} {middle:8.1f} ms {spread}, {middle / base:.2f} of the first\n")
    write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
