"""The robot's table: the gripper picks an object by closing on it."""

from __future__ import annotations

import numpy as np
import pytest

from sinkprune.demo.robot_table import CANVAS, MOST_STEPS, REACH, STEP, RobotTable

CLOSE, STAY = np.array([0.0, 0.0, 1.0]), np.zeros(3)


def _run(table: RobotTable, noise: float, rng: np.random.Generator) -> RobotTable:
    while not table.done:
        table.step(table.plan(1)[0] + rng.normal(0, [noise, noise, 0.1]))
    return table


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_expert_picks_the_named_object(noise: float) -> None:
    rng = np.random.default_rng(0)
    ended = [_run(RobotTable(f"test {seed}"), noise, rng) for seed in range(100)]
    assert sum(table.succeeded for table in ended) >= 95
    assert max(table.steps for table in ended) < MOST_STEPS


def test_only_the_named_object_counts() -> None:
    for seed in range(30):
        for number in range(len(RobotTable(seed).objects)):
            table = RobotTable(seed)
            colour, shape = table.objects[number].pair
            table.gripper = table.place(number)
            table.step(CLOSE)
            assert table.done and table.picked == number
            assert table.succeeded == (table.instruction == f"pick the {colour} {shape}")


@pytest.mark.parametrize(("factor", "picks"), [(0.99, True), (1.01, False)])
def test_the_gripper_picks_within_its_reach(factor: float, picks: bool) -> None:
    table = RobotTable("reach", most_objects=1)
    table.gripper = table.place(0) + np.array([0, REACH * factor])
    table.step(STAY)
    assert table.picked is None and not table.done
    table.step(CLOSE)
    assert table.succeeded == picks and table.done


def test_a_step_is_bounded_and_stays_on_the_table() -> None:
    table = RobotTable("step")
    before = table.gripper
    table.step(np.array([3.0, -4.0, 0.5]))
    assert np.allclose(table.gripper - before, np.array([0.6, -0.8]) * STEP)
    for _ in range(MOST_STEPS):
        table.step(np.array([0.0, -1.0, 0.0]))
    assert table.gripper[1] == 0
    assert table.done and not table.succeeded


def test_objects_differ_and_lie_apart_on_the_table() -> None:
    for seed in range(100):
        objects = RobotTable(seed).objects
        assert 3 <= len(objects) <= 5
        assert len({thing.pair for thing in objects}) == len(objects)
        for i, thing in enumerate(objects):
            assert thing.half_width < min(thing.x, thing.y) and max(thing.x, thing.y) < CANVAS - thing.half_width
            others = (RobotTable(seed).place(j) for j in range(i))
            assert all(np.hypot(*(RobotTable(seed).place(i) - other)) > 2 * REACH for other in others)
    assert {len(RobotTable(seed, most_objects=2).objects) for seed in range(9)} == {2}
