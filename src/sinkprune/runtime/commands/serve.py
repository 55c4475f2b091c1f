"""`sinkprune-serve`: answers requests of other programs over HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence

from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.json_output import json_outputs, write_json
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.runtime.commands import Options, bundle_parser
from sinkprune.runtime.commands.served_app import (
    API_KEY,
    add_app_options,
    load_app,
    log,
    read_app_bundle,
)

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

    found = read_app_bundle(options)
    # Before the engines are loaded, because a port that is taken should be reported soon.
    with _listening(options.host, options.port) as listener:
        app = load_app(options, found, options.host)
        # After the check that uvicorn is installed.
        from sinkprune.runtime.server.connections import Server

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
        write_json(options.json, {"url": f"http://{shown}:{port}/v1", "models": found.models})
        page = f"http://{shown}:{port}/"
        log(f"{escaped(found.name)} answers at {page}v1. {page} is a page to try it. Ctrl-C ends it.")
        asyncio.run(server.serve([listener]))
        log("The server has ended.")


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
