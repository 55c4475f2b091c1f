"""`sinkprune-serve`: answers requests of other programs over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from PIL import Image

from sinkprune.contract.budgets import AUTO, UNPRUNED
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.json_output import json_outputs, write_json
from sinkprune.contract.costs.file import read_costs
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.runtime.commands import BundleOptions, add_costs, bundle_parser, load_pipeline, status
from sinkprune.runtime.commands.memory import PlannedRequests, check_memory
from sinkprune.runtime.confidence.thresholds import missing_thresholds, read_thresholds
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.session import MAX_BYTES
from sinkprune.runtime.steps.picture_warnings import seen_part
from sinkprune.runtime.steps.request import DEFAULT_NEW_TOKENS

API_KEY = "SINKPRUNE_API_KEY"
"""The environment variable with the API key."""
_MIB = 1 << 20
_PORT = WholeNumber("port", 0, 65535)
_COUNT = WholeNumber("requests", 1, 10_000)
_MEGABYTES = WholeNumber("megabytes", 0, 1 << 20)
_SECONDS = WholeNumber("seconds", 0, 86_400)
_DRAIN_S = 5
_GRACE_S = 5
_USUAL_PICTURE = Image.new("RGB", (640, 480))
_EXAMPLES = f"""\
examples:
  sinkprune-serve bundle --budget retain-64
  sinkprune-serve engines --host 0.0.0.0 --port 8080 --api-key "$(cat key)"

Any client of OpenAI's chat completions works, with http://127.0.0.1:8000/v1 as its base URL. The model is the
bundle's name; NAME:retain-64 chooses a budget, and NAME:auto with --thresholds. The API key may also be in the
environment variable {API_KEY}.
"""


@dataclass(kw_only=True)
class _Options(BundleOptions):
    host: str
    port: int
    name: str | None
    budget: str
    costs: Path | None
    thresholds: Path | None
    api_key: str | None
    allow_remote_images: bool
    max_queue: int
    max_active: int
    max_body_mb: int
    session_mb: int
    drain_s: int
    json: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_command(_run, arguments)


def _run(arguments: Sequence[str] | None) -> None:
    parser = bundle_parser("sinkprune serve", "Answer questions about pictures over HTTP, as OpenAI does.", _EXAMPLES)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0 for all (default: 127.0.0.1)")
    add("--port", type=_PORT, default=8000, help="the port to listen at; 0 for any free one (default: 8000)")
    add("--name", help="the model's name (default: the name of the bundle's folder)")
    add("--budget", default=UNPRUNED, help="the budget of requests that name none (default: none)")
    add_costs(parser)
    add(
        "--thresholds",
        type=Path,
        metavar="FILE.json",
        help="adds budget auto for closed lists: how sure answers must be, from sinkprune-calibrate confidence "
        "--thresholds",
    )
    add("--api-key", metavar="KEY", help="the key that every request must have")
    add("--allow-remote-images", action="store_true", help="fetch pictures from https addresses of public hosts")
    add("--max-queue", type=_COUNT, default=64, help="requests that wait or run before 429 (default: 64)")
    add("--max-active", type=_COUNT, default=8, help="requests that run at once, each with KV caches (default: 8)")
    add("--max-body-mb", type=_MEGABYTES, default=64, help="the largest request, in MiB (default: 64)")
    add(
        "--session-mb",
        type=_MEGABYTES,
        default=MAX_BYTES // _MIB,
        help=f"memory for what questions about the same pictures share, in MiB (default: {MAX_BYTES // _MIB})",
    )
    add(
        "--drain-s",
        type=_SECONDS,
        default=_DRAIN_S,
        metavar="SECONDS",
        help=f"time that requests have to end after SIGTERM or Ctrl-C (default: {_DRAIN_S})",
    )
    parser.add_json("the server's address and models, as soon as it listens,")
    options = parser.parse(arguments, _Options)
    read = [*options.key_files, *(file for file in (options.costs, options.thresholds) if file)]
    check_outputs(json_outputs(options.json), read, options.folders)

    server = _import_server()
    bundle = read_runnable(options.bundle, options.trust)
    thresholds = read_thresholds(options.thresholds) if options.thresholds else None
    if thresholds is not None:
        thresholds.check(bundle, "sinkpruner")
    elif options.budget == AUTO:
        raise missing_thresholds(bundle.manifest, "sinkpruner")
    if options.budget != AUTO:
        bundle.manifest.plan("sinkpruner", options.budget)
    name = options.bundle.resolve().name if options.name is None else options.name
    if not name or ":" in name or not name.isprintable():
        raise UsageError(f"the model's name is '{name}', expected printable characters without ':'. Choose a --name.")
    # Before the engines are loaded, because a port that is taken should be reported soon.
    with _listening(options.host, options.port) as listener:
        budgets = [UNPRUNED, *([options.budget] if options.budget != AUTO else [])]
        check_memory(
            options, bundle, PlannedRequests([_USUAL_PICTURE], "sinkpruner", budgets, "", DEFAULT_NEW_TOKENS)
        )
        pipeline = load_pipeline(options, bundle)
        pipeline.thresholds = thresholds
        if options.costs:
            pipeline.costs = read_costs(options.costs, pipeline.place)
        with status("loading the pruning graphs"):
            pipeline.load_plans("sinkpruner")
        settings = server.ServerSettings(
            name=name,
            budget=options.budget,
            api_key=options.api_key or os.environ.get(API_KEY) or None,
            allow_remote_images=options.allow_remote_images,
            max_body_bytes=options.max_body_mb * _MIB,
            max_queue=options.max_queue,
            max_active=options.max_active,
            session_bytes=options.session_mb * _MIB,
        )
        host, port = listener.getsockname()[:2]
        models = server.model_names(name, bundle.manifest, auto=thresholds is not None)
        shown = f"[{host}]" if ":" in host else host
        write_json(options.json, {"url": f"http://{shown}:{port}/v1", "models": models})
        if (layout := pipeline.family.layout(_USUAL_PICTURE)).seen_share < 1:
            sys.stderr.write(
                f"note: {seen_part(layout)}, and of others in proportion; the response has seen_share. --fit pad "
                "shows pictures whole (docs/pictures.md).\n"
            )
        page = f"http://{shown}:{port}/"
        sys.stderr.write(f"{escaped(name)} answers at {page}v1. {page} is a page to try it. Ctrl-C ends it.\n")
        sys.stderr.flush()
        _serve(pipeline, settings, listener, options.drain_s)


def _serve(pipeline: Pipeline, settings: Any, listener: socket.socket, drain_s: int) -> None:
    """Answer until the process is interrupted. Requests then have `drain_s` seconds to end, or get status 503."""
    import uvicorn

    app = _import_server().new_app(pipeline, settings)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # In a thread, because it waits for the model's current step.
            ending = Timer(drain_s, app.state.end_requests)
            ending.start()
            try:
                await super().shutdown(sockets)
            finally:
                ending.cancel()

    # The responses of requests that were ended take some time too.
    grace_s = drain_s + _GRACE_S
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=grace_s, server_header=False)
    # uvicorn raises the signal again when it has ended.
    with suppress(KeyboardInterrupt):
        asyncio.run(Server(config).serve([listener]))


def _import_server() -> Any:
    """Return the module `server.app`; raises `UsageError` without the extra `server`."""
    try:
        import uvicorn  # noqa: F401

        from sinkprune.runtime.server import app
    except ImportError as error:
        raise UsageError(
            f"the server needs the package '{error.name}', which is not installed. Install it with: pip install "
            "'sinkprune[server]'"
        ) from error
    return app


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address; raises `UsageError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}, port {port}: {error.strerror}. Choose another --host or --port."
        ) from error
    # Connections inherit it. asyncio does not set it for them, and each response would wait 40 ms for the client.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
