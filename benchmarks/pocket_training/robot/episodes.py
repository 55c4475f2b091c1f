"""Closed-loop episodes of the robot with the model in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sinkprune.demo.robot_table import RobotTable

Act = Callable[[Sequence[RobotTable], Sequence[str], int], NDArray[np.float32]]
"""Returns [B,8,3]: the next actions at B tables with their instructions, in the robot's units. The last is a seed."""

RUN = 4
"""Actions of each chunk that the robot runs before it looks again."""


def run_episodes(act: Act, split: str, count: int, *, misnamed: bool = False) -> tuple[float, float]:
    """Return the shares of `count` episodes in which the gripper picked the target, and any object.

    With `misnamed`, the instruction names another object than the target.
    """
    tables = [RobotTable(f"{split} {index}") for index in range(count)]
    instructions = [table.instruction for table in tables]
    if misnamed:
        for table in tables:
            table.target = (table.target + 1) % len(table.objects)
    step = 0
    while going := [i for i, table in enumerate(tables) if not table.done]:
        at = [tables[i] for i in going]
        for table, chunk in zip(at, act(at, [instructions[i] for i in going], step), strict=True):
            for action in chunk[:RUN]:
                if not table.done:
                    table.step(action)
        step += 1
    picked = sum(table.picked is not None for table in tables)
    return sum(table.succeeded for table in tables) / count, picked / count
