"""The server in replicas of Ray Serve: `serve run sinkprune.serving.ray_serve:build bundle=BUNDLE replicas=2`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sinkprune.contract.checks import WholeNumber, install_command, needs_package
from sinkprune.contract.errors import PictureWarning, UsageError
from sinkprune.runtime.commands.options import Options, bundle_parser
from sinkprune.runtime.system import usable_cores
from sinkprune.serving.command import add_app_options, load_app, read_app_bundle

if TYPE_CHECKING:
    from starlette.applications import Starlette

_REPLICAS = WholeNumber("replicas", 1, 10_000)
_WAITING = WholeNumber("max-waiting", 0, 1_000_000)
_BY_SESSION = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
"""Sends requests with the same header x-session-id to the same replica."""
_EXAMPLES = "Arguments are written NAME=VALUE, without dashes: bundle=/srv/bundle replicas=2 sessions=true"


class Replica:
    """A process of Ray with its own copy of the weights, which runs the application of `sinkprune-serve`."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __serve_build_asgi_app__(self) -> Starlette:
        """Load the bundle and return the application."""
        # The replica's log has one note instead.
        warnings.simplefilter("ignore", PictureWarning)
        return load_app(self._options, read_app_bundle(self._options))


def build(arguments: Mapping[str, Any]) -> Any:
    """Return the application for `serve run` and for the `import_path` of a Serve config file (docs/ray.md).

    `arguments` has `bundle`, and may have `replicas` (default: 1), `sessions` (true: requests with the same header
    x-session-id reach the same replica), `max_waiting` (the most requests that wait for a replica before status 503)
    and the options of `sinkprune-serve` without dashes, except host, port, drain_s and json. A replica has `threads`
    CPU threads, and Ray reserves as many CPUs for it. By default, this machine's cores are divided among replicas.

    Raises `UsageError` for unknown arguments and without the extra `ray`, and what `sinkprune-serve` raises.
    """
    options = _parse(arguments)
    # A wrong option should end the command, not each replica.
    read_app_bundle(options)
    with needs_package("Ray Serve", install_command("ray")):
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    router = dict[str, Any]()
    if options.sessions:
        router["request_router_config"] = RequestRouterConfig(request_router_class=_BY_SESSION)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="sinkprune",
        num_replicas=options.replicas,
        # Ray holds all other requests back, so that a replica never answers 429.
        max_ongoing_requests=options.max_queue,
        max_queued_requests=options.max_waiting,
        ray_actor_options={"num_cpus": options.threads},
        **router,
    )
    return deployment.bind(options)


def _parse(arguments: Mapping[str, Any]) -> Options:
    parser = bundle_parser(
        "sinkprune.serving.ray_serve:build", "Answer questions about pictures on Ray Serve.", _EXAMPLES
    )
    add_app_options(parser)
    parser.add_argument("--replicas", type=_REPLICAS, default=1)
    parser.add_argument("--sessions", action="store_true")
    parser.add_argument("--max-waiting", type=_WAITING, default=1000)

    def refuse(message: str) -> NoReturn:
        raise UsageError(
            f"{message}. Expected bundle=BUNDLE, replicas, sessions, max_waiting, and options of sinkprune-serve "
            "without dashes. Host and port are Ray's (docs/ray.md)."
        )

    parser.error = refuse  # type: ignore[method-assign]
    # Otherwise a misspelt name could be the beginning of another.
    parser.allow_abbrev = False
    flags = {option for action in parser._actions if action.nargs == 0 for option in action.option_strings}
    words = []
    for name, given in arguments.items():
        option = f"--{name.replace('_', '-')}"
        for text in map(str, given if isinstance(given, list) else [given]):
            if name == "bundle":
                words.append(text)
            elif option not in flags or text.lower() not in ("true", "false"):
                words.append(f"{option}={text}")
            elif text.lower() == "true":
                words.append(option)
    options = parser.parse(words, Options)
    # Where Ray's proxies listen, on this machine or on others, is set elsewhere.
    options.host = "0.0.0.0"
    if options.threads is None:
        options.threads = max(1, usable_cores() // options.replicas)
    # Replicas may have another current folder.
    for name, value in vars(options).items():
        if isinstance(value, Path):
            setattr(options, name, value.resolve())
    return options
