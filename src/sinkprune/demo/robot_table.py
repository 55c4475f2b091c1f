"""A drawn table with coloured shapes and a gripper: the simulator of the pocket robot.

Lengths are in widths of the table. x points right and y points down, from the table's upper left corner.
"""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from sinkprune.demo.scenes import COLOURS, SHAPES, Scene, SceneObject, draw_scene

CAMERA_NAMES = "table", "close"
"""The names of the cameras, in the order of the policy's training."""
SIDE = 96
"""Width and height of both cameras' pictures in pixels."""
CANVAS = 2 * SIDE
"""Width and height of the drawn table in pixels."""
RADIUS = 19
"""Radius of an object in pixels of the drawn table."""
STEP = 0.06
"""The farthest that the gripper moves in one step."""
REACH = 0.05
"""The gripper picks an object whose centre is within this distance."""
MOST_STEPS = 40
"""An episode fails after this many steps."""
_CLOSES = 0.015
"""The expert closes the gripper within this distance of the object."""
_FLOOR = (40, 42, 46)
_FINGER = (20, 20, 24)


class RobotTable:
    """One episode: a gripper above three to five objects, one of which the instruction names."""

    def __init__(self, seed: int | str, most_objects: int = 5) -> None:
        self.reset(seed, most_objects)

    def reset(self, seed: int | str, most_objects: int = 5) -> None:
        """Start the episode of `seed`, with three objects or more if `most_objects` allows as many."""
        rng = Random(f"table {seed}")
        count = rng.randint(min(3, most_objects), most_objects)
        pairs = rng.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], count)
        things = list[SceneObject]()
        while len(things) < count:
            x, y = (rng.randint(RADIUS + 4, CANVAS - RADIUS - 4) for _ in range(2))
            # Open fingers fit between two objects.
            if all(np.hypot(x - thing.x, y - thing.y) > 2.5 * RADIUS for thing in things):
                colour, shape = pairs[len(things)]
                things.append(SceneObject(shape, colour, "", "", x, y, RADIUS, RADIUS))
        self.objects, self.target = tuple(things), rng.randrange(count)
        grey = rng.uniform(150, 215)
        tone = tuple(round(grey + rng.uniform(-20, 20)) for _ in range(3))
        self._table = draw_scene(Scene(self.objects, (), size=(CANVAS, CANVAS)), Image.new("RGB", (1, 1), tone))
        self.gripper = np.array([rng.uniform(0.1, 0.9) for _ in range(2)])
        self.closed, self.steps = False, 0

    @property
    def instruction(self) -> str:
        """Name the target, for example ``pick the red star``."""
        return f"pick the {' '.join(self.objects[self.target].pair)}"

    @property
    def picked(self) -> int | None:
        """The number of the object between the closed fingers, or None."""
        distances = [float(np.hypot(*(self.place(i) - self.gripper))) for i in range(len(self.objects))]
        nearest = int(np.argmin(distances))
        return nearest if self.closed and distances[nearest] <= REACH else None

    @property
    def succeeded(self) -> bool:
        """Whether the gripper has closed on the target."""
        return self.picked == self.target

    @property
    def done(self) -> bool:
        """Whether the gripper has closed, or the steps are used up."""
        return self.closed or self.steps >= MOST_STEPS

    def place(self, number: int) -> NDArray[np.float64]:
        """Return [2]: the centre of an object."""
        return np.array([self.objects[number].x, self.objects[number].y]) / CANVAS

    def state(self) -> NDArray[np.float32]:
        """Return [2]: x and y of the gripper."""
        return self.gripper.astype(np.float32)

    def step(self, action: NDArray[np.floating]) -> None:
        """Move by dx and dy, at most `STEP` far, then close the gripper if the third number exceeds 0.5."""
        dx, dy, closing = (float(value) for value in action)
        move = np.array([dx, dy]) * min(1.0, STEP / max(np.hypot(dx, dy), 1e-9))
        self.gripper = np.clip(self.gripper + move, 0, 1)
        self.closed, self.steps = closing > 0.5, self.steps + 1

    def plan(self, steps: int) -> NDArray[np.float32]:
        """Return [steps,3]: the next actions of the expert, who slows down before the target and closes on it."""
        left, actions = self.place(self.target) - self.gripper, list[list[float]]()
        closed = self.closed
        for _ in range(steps):
            closed = closed or bool(np.hypot(*left) < _CLOSES)
            move = np.zeros(2) if closed else left * min(0.6, STEP / np.hypot(*left))
            actions.append([*move, float(closed)])
            left = left - move
        return np.array(actions, np.float32)

    def cameras(self) -> tuple[Image.Image, Image.Image]:
        """Return pictures of 96 x 96 pixels by `CAMERA_NAMES`: the whole table, and the gripper, twice as large."""
        table = self._table.copy()
        x, y = (round(float(value) * CANVAS) for value in self.gripper)
        draw, gap = ImageDraw.Draw(table), 8 if self.closed else 18
        for side in (-1, 1):
            inner, outer = sorted((x + side * gap, x + side * (gap + 6)))
            draw.rectangle([inner, y - 14, outer, y + 14], fill=_FINGER)
        draw.rectangle([x - gap - 6, y - 20, x + gap + 6, y - 14], fill=_FINGER)
        around = Image.new("RGB", (SIDE, SIDE), _FLOOR)
        around.paste(table, (SIDE // 2 - x, SIDE // 2 - y))
        return table.resize((SIDE, SIDE), Image.Resampling.BOX), around
