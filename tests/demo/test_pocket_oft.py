"""The pocket OFT's checkpoint is exported, and picks what the instruction names, unpruned and pruned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pocket_training.robot.episodes import run_episodes
from sinkprune import Policy, demo
from sinkprune.demo.robot_table import RobotTable
from sinkprune.export.command import main as export

OFT = Path(demo.__file__).parent / "pocket-oft"
OPTIONS = ["--max-images", "2", "--chunk", "8", "--bounds", "q01-q99", "--budgets", "prune-80"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    root = tmp_path_factory.mktemp("oft") / "oft"
    assert export([str(OFT), "-o", str(root), *OPTIONS]) == 0
    return Policy.load(root, threads=1)


@pytest.mark.parametrize(("budget", "misnamed"), [("none", False), ("none", True), ("prune-80", False)])
def test_it_picks_what_the_instruction_names(policy: Policy, budget: str, misnamed: bool) -> None:
    def act(tables: list[RobotTable], instructions: list[str], seed: int) -> NDArray[np.float32]:
        chunks = (
            policy.act(table.cameras(), instruction, table.state(), budget=budget).actions
            for table, instruction in zip(tables, instructions, strict=True)
        )
        return np.stack([*chunks])

    success, picked = run_episodes(act, "test", 8, misnamed=misnamed)
    assert picked >= 0.75
    assert success == 0 if misnamed else success >= 0.75


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in OFT.iterdir()) < 16e6
