"""Closed-loop episodes of the robot with the model in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pocket_training.robot.batches import instruction_ids, normalise, normalised, statistics
from pocket_training.robot.model import ACTION, CAMERAS, CHUNK, GRID, IMAGE
from sinkprune.demo.robot_table import RobotTable

RUN = 4
"""Actions of each chunk that the robot runs before it looks again."""


def act(
    model: Any, tokenizer: Tokenizer, tables: Sequence[RobotTable], instructions: Sequence[str], seed: int
) -> NDArray[np.float32]:
    """Return [B,8,3]: the model's next actions at each table, in the robot's units."""
    mean, std = statistics().actions_mean, statistics().actions_std
    images = [IMAGE] * (CAMERAS * GRID**2)
    ids = torch.tensor([images + instruction_ids(instruction, tokenizer) for instruction in instructions])
    pixels = np.stack([[normalised(picture) for picture in table.cameras()] for table in tables])
    states = [normalise(table.state(), statistics().state_mean, statistics().state_std) for table in tables]
    actions = model.sample_actions(
        state=torch.from_numpy(np.stack(states)),
        input_ids=ids,
        pixel_values=torch.from_numpy(pixels),
        noise=torch.randn(len(tables), CHUNK, ACTION, generator=torch.Generator().manual_seed(seed)),
        attention_mask=torch.ones_like(ids),
        pixel_attention_mask=torch.ones(len(tables), CAMERAS, dtype=torch.bool),
    )
    return np.asarray(actions.numpy() * np.array(std, np.float32) + np.array(mean, np.float32))


def run_episodes(
    model: Any, tokenizer: Tokenizer, split: str, count: int, *, misnamed: bool = False
) -> tuple[float, float]:
    """Return the shares of `count` episodes in which the gripper picked the target, and any object.

    With `misnamed`, the instruction names another object than the target.
    """
    tables = [RobotTable(f"{split} {index}") for index in range(count)]
    instructions = [table.instruction for table in tables]
    if misnamed:
        for table in tables:
            table.target = (table.target + 1) % len(table.objects)
    model.eval()
    step = 0
    while going := [i for i, table in enumerate(tables) if not table.done]:
        at = [tables[i] for i in going]
        for table, chunk in zip(at, act(model, tokenizer, at, [instructions[i] for i in going], step), strict=True):
            for action in chunk[:RUN]:
                if not table.done:
                    table.step(action)
        step += 1
    picked = sum(table.picked is not None for table in tables)
    return sum(table.succeeded for table in tables) / count, picked / count
