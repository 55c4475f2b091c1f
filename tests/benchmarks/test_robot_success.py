"""The program that measures the pocket robot's success, on a few episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import robot_success
from sinkprune import demo
from sinkprune.export.command import main as export

ROBOT = Path(demo.__file__).parent / "pocket-robot"


def test_the_robot_picks_unpruned_and_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, written = tmp_path / "robot", tmp_path / "success.json"
    plans = ["--max-images", "2", "--budgets", "prune-66.7", "--methods", "sinkpruner,downsample"]
    assert export([str(ROBOT), "-o", str(bundle), *plans]) == 0
    assert robot_success.main([str(bundle), "--episodes", "6", "--json", str(written)]) == 0
    report = json.loads(written.read_text(encoding="utf-8"))
    success = {(row["method"], row["budget"]): row["success"] for row in report["rows"]}
    assert set(success) == {
        ("sinkpruner", "none"),
        ("sinkpruner", "prune-66.7"),
        ("downsample", "prune-66.7"),
    }
    assert (report["episodes"], report["interrupted"]) == (6, None)
    assert success["sinkpruner", "none"] >= 5 / 6
    assert all(0 <= row["ci95"][0] <= row["success"] <= row["ci95"][1] <= 1 for row in report["rows"])
    assert all(row["chunk_ms"] > 0 and row["chunks_an_episode"] >= 1 for row in report["rows"])
    assert [row["versus_first"] is None for row in report["rows"]] == [True, True, False]
    versus = report["rows"][2]["versus_first"]
    paired = success["downsample", "prune-66.7"] - success["sinkpruner", "prune-66.7"]
    assert versus["mean"] == pytest.approx(paired)
    assert versus["ci95"][0] <= paired <= versus["ci95"][1]
    assert "| `sinkpruner` | `none` |" in capsys.readouterr().out
