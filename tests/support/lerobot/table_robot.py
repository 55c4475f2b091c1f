"""The pocket robot's table as a robot of LeRobot, driven by LeRobot's own client of its policy server.

    python -m support.lerobot.table_robot ADDRESS FOLDER SEED ACTIONS

runs one episode with the policy of FOLDER, ACTIONS of each chunk, and prints JSON: the actions that the robot
received, and whether it picked the named object.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from threading import Thread
from typing import Any, ClassVar

import numpy as np
from lerobot.async_inference.configs import RobotClientConfig
from lerobot.async_inference.robot_client import RobotClient
from lerobot.robots import Robot, RobotConfig

from sinkprune.demo.robot_table import SIDE, RobotTable

CAMERAS = ("table", "close")
SECONDS = 120


@RobotConfig.register_subclass("table")
@dataclass
class TableRobotConfig(RobotConfig):  # type: ignore[misc]
    seed: str = "0"


class TableRobot(Robot):  # type: ignore[misc]
    """A table with a gripper, and two cameras."""

    config_class, name = TableRobotConfig, "table"
    is_connected = is_calibrated = True
    observation_features: ClassVar = {"x": float, "y": float, **dict.fromkeys(CAMERAS, (SIDE, SIDE, 3))}
    action_features: ClassVar = {"dx": float, "dy": float, "closing": float}

    def __init__(self, config: TableRobotConfig) -> None:
        super().__init__(config)
        self.table, self.received = RobotTable(config.seed), list[list[float]]()

    def connect(self, calibrate: bool = True) -> None: ...

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def disconnect(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        x, y = self.table.state()
        frames = map(np.asarray, self.table.cameras())
        return {"x": float(x), "y": float(y), **dict(zip(CAMERAS, frames, strict=True))}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        if not self.table.done:
            self.received.append([action[name] for name in self.action_features])
            self.table.step(np.array(self.received[-1]))
        return action


def run_episode(address: str, folder: str, seed: str, actions: int) -> dict[str, Any]:
    """Run an episode; LeRobot's client looks again when the robot has run all actions it has."""
    client = RobotClient(
        RobotClientConfig(
            policy_type="sinkprune",
            pretrained_name_or_path=folder,
            robot=TableRobotConfig(seed=seed),
            actions_per_chunk=actions,
            server_address=address,
            chunk_size_threshold=0,
            fps=50,
            aggregate_fn_name="latest_only",
        )
    )
    assert client.start(), "the server did not take the policy"
    table, until = client.robot.table, time.monotonic() + SECONDS
    threads = [Thread(target=client.receive_actions), Thread(target=client.control_loop, args=(table.instruction,))]
    for thread in threads:
        thread.start()
    while not table.done and time.monotonic() < until:
        time.sleep(0.05)
    client.shutdown_event.set()
    for thread in threads:
        thread.join()
    client.stop()
    return {"actions": client.robot.received, "succeeded": table.succeeded}


if __name__ == "__main__":
    address, folder, seed, actions = sys.argv[1:]
    json.dump(run_episode(address, folder, seed, int(actions)), sys.stdout)
