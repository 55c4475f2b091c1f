"""LeRobot's asynchronous inference server, with policies of type `sinkprune` too.

    python -m sinkprune.runtime.lerobot.policy_server --host=127.0.0.1 --port=8080

Takes the options of `lerobot.async_inference.policy_server`. The server loads what clients send with `pickle`, which
can run any program. Let only machines that you trust reach its port.
"""

from __future__ import annotations

from sinkprune.runtime.lerobot.policy import SinkprunePolicy


def main() -> None:
    """Serve until the process ends."""
    # Here, because importing the server starts its log and needs LeRobot's extra for gRPC.
    from lerobot.async_inference.constants import SUPPORTED_POLICIES
    from lerobot.async_inference.policy_server import serve

    # The server rejects types that are not in this list, and LeRobot has no other way to add one.
    SUPPORTED_POLICIES.append(SinkprunePolicy.name)
    serve()


if __name__ == "__main__":
    main()
