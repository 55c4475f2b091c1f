"""The batch of a training step of the robot: pictures, what each patch shows, and the expert's actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from pocket_training.batches import show
from pocket_training.robot.model import ACTION, BOS, CHUNK, GRID, PATCH, STATE, Statistics
from sinkprune.demo.robot_table import CANVAS, SIDE, RobotTable
from sinkprune.demo.scenes import COLOURS, SHAPES

_VISITS = 4
"""Places of the gripper, each with a target, on one drawn table."""
_MARGIN = 2
"""Pixels around an object's box that still belong to it."""


class Form(NamedTuple):
    """How a policy reads pictures, instructions and numbers."""

    pixels: Callable[[Image.Image], NDArray[np.float32]]
    """Returns [3,s,s] between -1 and 1."""
    ids: Callable[[str], list[int]]
    """Returns the token ids after the pictures."""
    statistics: Statistics


@dataclass
class Batch:
    """B moments of episodes, with the cameras' pictures and V patches of each."""

    pixels: torch.Tensor
    """[B,2,3,s,s] fp32 between -1 and 1."""
    patches: torch.Tensor
    """[B,2,V] int64, ascending: the patches of each picture that exist."""
    classes: torch.Tensor
    """[B,2,V,3] int64: shape and colour of the object that each patch shows, 0 for none; 1 for the target."""
    centres: torch.Tensor
    """[B,2,V,2] fp32: x and y of that object's centre, in patches from the picture's centre."""
    ids: torch.Tensor
    """[B,T] token ids of the instruction."""
    state: torch.Tensor
    """[B,3] fp32, normalised."""
    actions: torch.Tensor
    """[B,8,3] fp32, normalised: the expert's."""
    goal: torch.Tensor
    """[B,2] fp32: the target's centre, from the table's centre."""


def draw_batch(first: int, tables: int, most_objects: int, shown: int, form: Form) -> Batch:
    """Return the batch of training tables `first` to `first + tables`, with several visits of each.

    The gripper is anywhere: half of the visits are near an object. So the expert shows the way back from every error.
    """
    visited = [
        _visit(table, index, visit, shown, form)
        for index in range(first, first + tables)
        for table in [RobotTable(f"training {index}", most_objects)]
        for visit in range(_VISITS)
    ]
    return Batch(*(torch.from_numpy(np.stack(values)) for values in zip(*visited, strict=True)))


def _visit(table: RobotTable, index: int, visit: int, shown: int, form: Form) -> tuple[NDArray[np.generic], ...]:
    rng = np.random.default_rng([index, visit])
    place(table, rng)
    scales = [(SIDE / CANVAS, np.zeros(2)), (1.0, np.round(table.gripper * CANVAS) - SIDE // 2)]
    targets = [patch_targets(table, scale, corner) for scale, corner in scales]
    patches = [show(classes, shown, rng) for classes, _ in targets]
    return (
        np.stack([form.pixels(picture) for picture in table.cameras()]),
        np.stack(patches),
        np.stack([classes[kept, :3] for (classes, _), kept in zip(targets, patches, strict=True)]),
        np.stack([centres[kept] for (_, centres), kept in zip(targets, patches, strict=True)]),
        np.array(form.ids(table.instruction)),
        normalise(table.state(), form.statistics.state_mean, form.statistics.state_std),
        normalise(table.plan(CHUNK), form.statistics.actions_mean, form.statistics.actions_std),
        (table.place(table.target) - 0.5).astype(np.float32),
    )


def place(table: RobotTable, rng: np.random.Generator) -> None:
    """Move the gripper anywhere, half of the time near an object, and choose any object as the target."""
    table.target = int(rng.integers(len(table.objects)))
    near = table.place(table.target if rng.random() < 0.6 else int(rng.integers(len(table.objects))))
    table.gripper = np.clip(near + rng.normal(0, 0.07, 2), 0, 1) if rng.random() < 0.5 else rng.uniform(0, 1, 2)


def normalised(picture: Image.Image) -> NDArray[np.float32]:
    """Return [3,96,96] between -1 and 1, equal to the output of the checkpoint's image processor."""
    return np.asarray(picture, np.float32).transpose(2, 0, 1) / 127.5 - 1


def instruction_ids(instruction: str, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids after those of the pictures."""
    return [BOS, *tokenizer.encode(f"{instruction}\n", add_special_tokens=False).ids]


def normalise(values: NDArray[np.float32], mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return [...,3] as transformers' PI0Processor normalises and pads states and actions."""
    scaled = (values - np.array(mean, np.float32)) / (np.array(std, np.float32) + np.float32(1e-8))
    return np.pad(scaled, [(0, 0)] * (values.ndim - 1) + [(0, ACTION - values.shape[-1])])


def sampled_moments() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return states [500,2] and actions [4000,3] of the expert on 500 training tables."""
    states, actions = np.zeros((500, STATE)), np.zeros((500, CHUNK, ACTION))
    for index in range(len(states)):
        table = RobotTable(f"training {Random(index).randrange(10**6)}")
        place(table, np.random.default_rng(index))
        states[index], actions[index] = table.state(), table.plan(CHUNK)
    return states, actions.reshape(-1, ACTION)


@cache
def statistics() -> Statistics:
    """Return the statistics of 500 training tables, rounded."""
    states, actions = sampled_moments()
    values = (states.mean(0), states.std(0), actions.mean(0), actions.std(0))
    return Statistics(*(tuple(round(float(value), 4) for value in row) for row in values))


def patch_targets(
    table: RobotTable, scale: float, corner: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return [V,4] int64 and [V,2] fp32: what each patch shows in raster order, and its centre.

    The four are shape, colour, whether it is the target, and whether the patch holds the object's centre. The picture
    shows the drawn table times `scale` from `corner` (x and y in its pixels) on.
    """
    classes, centres = np.zeros((GRID, GRID, 4), np.int64), np.zeros((GRID, GRID, 2), np.float32)
    y, x = (np.mgrid[0:GRID, 0:GRID] + 0.5) * PATCH
    for number, thing in enumerate(table.objects):
        across, down = (np.array([thing.x, thing.y]) - corner) * scale
        reach = thing.half_width * scale + _MARGIN
        inside = (abs(x - across) <= reach) & (abs(y - down) <= reach)
        centre = (abs(x - across) <= PATCH / 2) & (abs(y - down) <= PATCH / 2)
        classes[inside, 0] = SHAPES.index(thing.shape) + 1
        classes[inside, 1] = list(COLOURS).index(thing.colour) + 1
        classes[inside, 2] = number == table.target
        classes[centre, 3] = 1
        centres[inside] = (np.array([across, down]) - SIDE / 2) / PATCH
    return classes.reshape(-1, 4), centres.reshape(-1, 2)
