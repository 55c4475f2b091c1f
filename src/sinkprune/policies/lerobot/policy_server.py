"""LeRobot's asynchronous inference server, with policies of type `sinkprune` too, and without loss of actions.

    python -m sinkprune.policies.lerobot.policy_server --host=127.0.0.1 --port=8080

Takes the options of `lerobot.async_inference.policy_server`. LeRobot's client gives an observation the number of the
last action that ran, LeRobot's server gives that number to the first action of the chunk, and the client drops it.
This server counts from the next number. The server loads what clients send with `pickle`, which can run any program.
Let only machines that you trust reach its port.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from sinkprune.contract.checks import needs_package
from sinkprune.contract.command_line.command import run_command
from sinkprune.policies.lerobot import INSTALL


def _serve(arguments: Sequence[str] | None) -> None:
    """Serve until the process ends. LeRobot reads the process's own arguments."""
    with needs_package("LeRobot's server", INSTALL):
        # Importing the server starts its log and needs LeRobot's extra for gRPC.
        from lerobot.async_inference import policy_server
        from lerobot.async_inference.constants import SUPPORTED_POLICIES

        from sinkprune.policies.lerobot.policy import SinkprunePolicy
    # The server rejects types that are not in this list, and LeRobot has no other way to add one.
    SUPPORTED_POLICIES.append(SinkprunePolicy.name)

    class Server(policy_server.PolicyServer):  # type: ignore[misc]
        def _time_action_chunk(self, t_0: float, action_chunk: list[Any], i_0: int) -> Any:
            return super()._time_action_chunk(t_0, action_chunk, i_0 + 1)

    # `serve` makes a server of the class with this name.
    policy_server.PolicyServer = Server
    policy_server.serve()


if __name__ == "__main__":
    sys.exit(run_command(_serve, None))
