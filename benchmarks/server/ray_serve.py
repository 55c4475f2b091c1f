"""Measures what Ray Serve adds to the times of a client, compared with `sinkprune-serve` alone.

    python benchmarks/server/ray_serve.py demo-output/bundle
    python benchmarks/server/ray_serve.py bundle --rounds 60 --threads 2 --json ray.json

Both servers run at once, each with one copy of the bundle and as many threads. Every round sends the same requests to
both, in an order that alternates, by one client: a question without a picture, a first question about a new random
picture of 640x480 pixels, and a second question about it. The client's time ends with the first event that has text.
The overhead is the difference, in the same round, of what the client's time has more than the server's own `ttft`:
other programs change `ttft`, and Ray does not. The table has medians and quartiles. Ray's workers have the niceness
of the client: Ray's own default, 15, gives them less time where other programs compute.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from serving import FIRST, SECOND, body, first_event_ms, picture, served
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.files.output_files import check_outputs

START_S, END_S = 300, 60


@contextmanager
def ray_served(**arguments: Any) -> Iterator[tuple[str, int]]:
    """Yield the address of the application on a Ray of its own, and the session of its processes.

    `arguments` are those of `sinkprune.serving.ray_serve:build`. All processes have ended after the block.
    """
    # Ray's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    application = {
        "name": "sinkprune",
        "route_prefix": "/",
        "import_path": "sinkprune.serving.ray_serve:build",
        "args": {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()},
    }
    config = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (folder / "serve.yaml").write_text(json.dumps(config))
    own = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    (folder / "token").write_text(secrets.token_hex(32))
    serve = [str(Path(sys.executable).parent / "serve"), "run", str(folder / "serve.yaml")]
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(
            serve, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_until_healthy(address, driver)
        except BaseException:
            sys.stderr.write((folder / "log").read_text()[-20_000:])
            raise
        yield address, driver.pid
    finally:
        driver.terminate()
        with suppress(subprocess.TimeoutExpired):
            driver.wait(END_S)
        _end(driver.pid)
        driver.wait()
        shutil.rmtree(folder, ignore_errors=True)


def processes(session: int, title: str = "") -> list[int]:
    """Return the processes of a session whose command begins with `title`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == session and (folder / "cmdline").read_text().startswith(title):
                found.append(int(folder.name))
    return found


def _wait_until_healthy(address: str, driver: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"{address}/health", timeout=10).status_code == 200:
                return
        if driver.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"Ray Serve does not answer at {address}. Its log is above.")
        time.sleep(0.2)


def _end(session: int) -> None:
    """Kill the processes of a session that have not ended after `END_S` seconds."""
    until = time.monotonic() + END_S
    while left := [pid for pid in processes(session) if pid != session]:
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


Times = dict[str, list[tuple[float, float]]]
"""By server, the client's milliseconds and the server's own `ttft`, of each round."""


def measure(servers: dict[str, tuple[str, str]], rounds: int, budget: str) -> dict[str, Times]:
    """Return the times of each request; three rounds before them do not count.

    `servers` has the base URL and the model of each.
    """
    rng, found = np.random.default_rng(0), dict[str, Times]()
    clients = {name: httpx.Client(base_url=url, timeout=600) for name, (url, _) in servers.items()}
    for number in range(rounds + 3):
        shown = picture(rng)
        for request, question in (("no picture", ""), ("first question", FIRST), ("second question", SECOND)):
            for name in sorted(servers, reverse=number % 2 == 1):
                asked = body(servers[name][1], shown, question, max_tokens=4, budget=budget)
                if not question:
                    asked |= {"messages": [{"role": "user", "content": FIRST}], "budget": "none"}
                times = first_event_ms(clients[name], asked)
                if number >= 3:
                    found.setdefault(request, {}).setdefault(name, []).append(times)
    for client in clients.values():
        client.close()
    return found


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    threads, name = ["--threads", str(options.threads)], "m"
    with (
        served(options.bundle, [*threads, "--name", name]) as alone,
        ray_served(bundle=options.bundle.resolve(), threads=options.threads, name=name) as (address, _),
    ):
        servers = {"sinkprune-serve": (alone["url"], name), "Ray Serve": (f"{address}/v1", name)}
        found = measure(servers, options.rounds, options.budget)
    for request, times in found.items():
        client, own = (np.array([times[name] for name in servers]).transpose(2, 0, 1)[part] for part in (0, 1))
        outside = client - own
        rows = dict(zip(servers, client, strict=True))
        for row, values in {**rows, "overhead": outside[1] - outside[0]}.items():
            low, middle, high = np.percentile(values, [25, 50, 75])
            sys.stdout.write(f"{request:16} {row:16} {middle:8.1f} ms (quartiles {low:.1f} to {high:.1f})\n")
    write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
