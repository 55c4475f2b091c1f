"""`sinkprune-serve`, and the options that the application has on Ray Serve too."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import WholeNumber, escaped, install_command, needs_package
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, json_outputs, write_json
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.deadlines.costs import read_costs
from sinkprune.deadlines.pipeline import Pipeline
from sinkprune.runtime.commands.options import Options, add_costs, bundle_parser, check_memory
from sinkprune.runtime.families import load_family
from sinkprune.runtime.loading import check_kind
from sinkprune.runtime.media.picture_warnings import seen_part
from sinkprune.runtime.steps.request import DEFAULT_METHOD, DEFAULT_NEW_TOKENS
from sinkprune.serving.callers import host_name, origin
from sinkprune.serving.sessions import MAX_BYTES, why_no_sessions

if TYPE_CHECKING:
    from starlette.applications import Starlette

API_KEY = "SINKPRUNE_API_KEY"
"""The environment variable with the API key."""
_MIB = 1 << 20
_MAX_QUEUE = WholeNumber("max_queue", 1, 10_000)
_MAX_ACTIVE = _MAX_QUEUE.named("max_active")
_MAX_BODY_MB = WholeNumber("max_body_mb", 1, 1 << 20)
_MAX_WAITING_BYTES = WholeNumber("max_waiting_bytes", 1, 1 << 50)
_SESSION_MB = WholeNumber("session_mb", 0, 1 << 20)
_USUAL_PICTURE = Image.new("RGB", (640, 480))
_PORT = WholeNumber("port", 0, 65535)
_DRAIN_S = WholeNumber("drain_s", 0, 86_400)
_USUAL_DRAIN_S = 5
_EXAMPLES = f"""\
examples:
  sinkprune-serve bundle --budget retain-64
  sinkprune-serve engines --host 0.0.0.0 --port 8080 --api-key "$(cat key)"

Any client of OpenAI's chat completions works, with http://127.0.0.1:8000/v1 as its base URL. The model is the
bundle's name; NAME:retain-64 chooses a budget. The API key may also be in the environment variable
{API_KEY}.
"""


def add_app_options(parser: CommandParser) -> None:
    """Add what the application answers, and its limits."""
    add = parser.add_argument
    add("--name", help="the model's name (default: the name of the bundle's folder, to which a link leads)")
    budget = parser.group("budget").add_argument
    budget("--budget", default=UNPRUNED, help="the budget of requests that name none (default: none)")
    budget(
        "--method", default=DEFAULT_METHOD, help=f"the method of requests that name none (default: {DEFAULT_METHOD})"
    )
    add_costs(parser)
    add("--api-key", metavar="KEY", help="the key that every request must have")
    add(
        "--allow-host",
        action="append",
        default=[],
        type=host_name,
        metavar="NAME",
        help="a further name that requests without a key may call the server by; may be repeated",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        type=origin,
        metavar="ORIGIN",
        help="a web page's origin, as https://robot.example, that may ask and read answers; may be repeated",
    )
    add("--allow-remote-images", action="store_true", help="fetch pictures from https addresses of public hosts")
    add("--max-queue", type=_MAX_QUEUE, default=64, help="requests that wait or run before 429 (default: 64)")
    add(
        "--max-active",
        type=_MAX_ACTIVE,
        default=8,
        help="requests that run at once, with KV caches; the first of a higher priority always does (default: 8)",
    )
    add(
        "--max-body-mb",
        dest="max_body_bytes",
        type=lambda word: _MAX_BODY_MB(word) * _MIB,
        default=64 * _MIB,
        metavar="MAX_BODY_MB",
        help="the largest request, in MiB (default: 64)",
    )
    add(
        "--max-waiting-bytes",
        type=_MAX_WAITING_BYTES,
        default=256 * _MIB,
        metavar="BYTES",
        help=f"bytes of all requests that arrive, wait or run before 429 (default: {256 * _MIB})",
    )
    add(
        "--session-mb",
        dest="session_bytes",
        type=lambda word: _SESSION_MB(word) * _MIB,
        default=MAX_BYTES,
        metavar="SESSION_MB",
        help=f"memory for what questions about the same pictures share, in MiB (default: {MAX_BYTES // _MIB})",
    )


def read_app_bundle(options: Options) -> Bundle:
    """Read the bundle's manifest, and check that it has what the options name.

    Sets `options.name` and `options.api_key` where they were not given. Raises `BundleError`, `BudgetError`, and
    `UsageError` for a robot policy, for a wrong name or key, and without the extra `server`.
    """
    bundle = read_runnable(options.bundle, options.trust)
    check_kind(bundle, acts=False)
    _import_app()
    bundle.manifest.plan(options.method, options.budget)
    if options.max_waiting_bytes < options.max_body_bytes:
        raise UsageError(
            f"--max-waiting-bytes is {options.max_waiting_bytes}, expected {options.max_body_bytes} or more: one "
            f"request may have {options.max_body_bytes // _MIB} MiB (--max-body-mb). Raise it, or lower "
            "--max-body-mb."
        )
    name = options.name = options.bundle.resolve().name if options.name is None else options.name
    if not name or ":" in name or not name.isprintable():
        raise UsageError(f"the model's name is '{name}', expected printable characters without ':'. Choose a --name.")
    options.api_key = _api_key(options)
    return bundle


def load_app(options: Options, bundle: Bundle) -> Starlette:
    """Load the graphs and return the application, whose server listens at `options.host`.

    Prints a note on stderr if the model sees pictures in part.

    Raises `TooLittleMemoryError`, `UsageError` for costs of other engines, and what `load_pipeline` raises.
    """
    usual = load_family(bundle.manifest, options.fit).layout(_USUAL_PICTURE)
    check_memory(options, bundle, [usual], options.method, [UNPRUNED, options.budget], "", DEFAULT_NEW_TOKENS)
    pipeline = Pipeline.load(bundle, fit=options.fit, **options.loading)
    if options.costs:
        pipeline.costs = read_costs(options.costs, pipeline.place)
    with status("loading the pruning graphs"):
        pipeline.load_plans(options.method)
    if usual.seen_share < 1:
        log(
            f"note: of a picture of {usual.size[0]}x{usual.size[1]} pixels, {seen_part(usual)}. Each response has "
            "the seen_share of its pictures. --fit pad shows them whole (docs/pictures.md)."
        )
    if options.session_bytes and (reason := why_no_sessions(pipeline)):
        log(f"note: nothing is kept between requests (--session-mb), because {reason}.")
    app: Starlette = _import_app().new_app(pipeline, options)
    return app


def log(line: str) -> None:
    """Write a line to stderr. On a full disk the log takes nothing more, and the server goes on."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _api_key(options: Options) -> str | None:
    """Return the key of the option or of the environment, or None; raises `UsageError` without printing the key."""
    where, key = "--api-key", options.api_key
    if key is None:
        where, key = f"the environment variable {API_KEY}", os.environ.get(API_KEY)
    if key is None:
        return None
    if not key:
        raise UsageError(f"{where} is empty, expected a key. Give a key, or leave it out for a server without one.")
    # Clients send keys in a header, which holds no other characters and loses spaces at its ends.
    if not key.isascii() or not key.isprintable() or key != key.strip():
        raise UsageError(
            f"{where} has characters that a header cannot hold, expected printable ASCII without spaces at its ends. "
            "Choose another key, as in: openssl rand -hex 32."
        )
    return key


def _import_app() -> Any:
    """Return the module `serving.app`; raises `UsageError` without the extra `server`."""
    with needs_package("the server", install_command("server")):
        import uvicorn  # noqa: F401

        from sinkprune.serving import app
    return app


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = bundle_parser("sinkprune serve", "Answer questions about pictures over HTTP, as OpenAI does.", _EXAMPLES)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen at; 0.0.0.0 for all (default: 127.0.0.1)")
    add("--port", type=_PORT, default=8000, help="the port to listen at; 0 for any free one (default: 8000)")
    add_app_options(parser)
    add(
        "--drain-s",
        type=_DRAIN_S,
        default=_USUAL_DRAIN_S,
        metavar="SECONDS",
        help=f"time that requests have to end after SIGTERM or Ctrl-C (default: {_USUAL_DRAIN_S})",
    )
    parser.add_json("the server's address and models, as soon as it listens,")
    options = parser.parse(arguments, Options)
    read = [*options.key_files, *([options.costs] if options.costs else [])]
    check_outputs(json_outputs(options.json), read, options.folders)

    bundle = read_app_bundle(options)
    # Before the engines are loaded, because a port that is taken should be reported soon.
    with _listening(options.host, options.port) as listener:
        app = load_app(options, bundle)
        # After the check that uvicorn is installed.
        from sinkprune.serving.chat_request import model_names
        from sinkprune.serving.connections import Server

        server = Server(app, drain_s=options.drain_s, max_queue=options.max_queue)
        if server.most < options.max_queue:
            log(
                f"note: {server.most} connections at once, fewer than --max-queue, because few files may be open. "
                "Raise the limit: ulimit -n."
            )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        # uvicorn takes signals over later, when asyncio has begun, and raises them again when it has ended.
        hangups = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else ()
        for number in (signal.SIGINT, signal.SIGTERM, *hangups):
            signal.signal(number, server.handle_exit)
        models = model_names(options.name, bundle.manifest, options.method)
        write_json(options.json, {"url": f"http://{shown}:{port}/v1", "models": models})
        page = f"http://{shown}:{port}/"
        log(f"{escaped(options.name)} answers at {page}v1. {page} is a page to try it. Ctrl-C ends it.")
        asyncio.run(server.serve([listener]))
        log("The server has ended.")


def _listening(host: str, port: int) -> socket.socket:
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
