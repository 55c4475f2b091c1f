"""The program that writes moments of the pocket robot, as its commands read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import write_moments
from sinkprune.demo.robot_table import RobotTable


def test_moments_are_of_other_tables_with_two_instructions_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "moments"
    assert write_moments.main([str(folder), "--tables", "4"]) == 0
    assert capsys.readouterr().out == f"8 moments of 4 tables in {folder}\n"
    lines = [json.loads(line) for line in (folder / "moments.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    for number in range(4):
        first, second = lines[2 * number : 2 * number + 2]
        table = RobotTable(f"moment {number}")
        for _ in range(number):
            table.step(table.plan(1)[0])
        assert first["cameras"] == second["cameras"] and first["state"] == second["state"]
        assert first["state"] == pytest.approx(table.state().tolist())
        assert first["instruction"] == table.instruction != second["instruction"]
        assert second["instruction"] in {f"pick the {' '.join(one.pair)}" for one in table.objects}
        for name, picture in zip(first["cameras"], table.cameras(), strict=True):
            with Image.open(folder / name) as written:
                np.testing.assert_array_equal(np.asarray(written), np.asarray(picture))
