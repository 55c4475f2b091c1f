"""Episodes of the pocket robot's table with `Policy` alone, next to which those of LeRobot are compared."""

from __future__ import annotations

import numpy as np

from sinkprune import Policy
from sinkprune.demo.robot_table import RobotTable

EPISODE, BUDGET, SEED, RUN = "test 2", "prune-66.7", 7, 4
"""An episode of three chunks; the budget; the seed of each chunk's noise; how many of its actions the robot runs."""


def episode(policy: Policy) -> tuple[list[list[float]], bool]:
    """Return the actions of the episode, and whether the robot picked the named object."""
    table, actions = RobotTable(EPISODE), list[list[float]]()
    while not table.done:
        chunk = policy.act(table.cameras(), table.instruction, table.state(), budget=BUDGET, seed=SEED).actions
        for action in chunk[:RUN]:
            if not table.done:
                actions.append(np.asarray(action, float).tolist())
                table.step(action)
    return actions, table.succeeded
