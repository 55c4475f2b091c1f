"""The program that measures the pocket robot's success, on a few episodes."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import robot_success
from sinkprune import demo
from sinkprune.contract.command_line.command import INTERRUPTED
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


def test_interrupted_it_keeps_whole_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(whole: int) -> int:
        """Run two plans, and interrupt the second of the episode after `whole` ones."""
        runs = count()

        def run_episode(*_: Any) -> robot_success.Episode:
            if next(runs) > 2 * whole:
                raise KeyboardInterrupt
            return robot_success.Episode(picked=True, chunk_ms=[10.0])

        monkeypatch.setattr(robot_success, "run_episode", run_episode)
        return robot_success.main(["bundle", "--episodes", "5", "--json", str(report)])

    policy = SimpleNamespace(
        bundle=SimpleNamespace(manifest=SimpleNamespace(plans={"sinkpruner": ["prune-80"]})),
        backend=SimpleNamespace(versions={}),
    )
    monkeypatch.setattr(robot_success, "Policy", SimpleNamespace(load=lambda *_, **__: policy))
    report, part = tmp_path / "success.json", tmp_path / "success.interrupted.json"
    assert measure(0) == INTERRUPTED
    assert capsys.readouterr() == ("", "interrupted; no whole episode was measured, so nothing was kept.\n")
    assert not report.exists()

    report.write_text("earlier", encoding="utf-8")
    assert measure(2) == INTERRUPTED
    table, lines = capsys.readouterr()
    assert table.startswith("2 episodes\n")
    assert [line.split(" |")[1] for line in table.splitlines()[4:]] == [" `none`", " `prune-80`"]
    sentence = "the table counts the first 2 of 5 episodes."
    earlier = f"Earlier files stay; these results are in '{part}'."
    assert lines.splitlines()[-1] == f"interrupted; {sentence} {earlier}"
    assert report.read_text(encoding="utf-8") == "earlier"
    kept = json.loads(part.read_text(encoding="utf-8"))
    assert (kept["episodes"], kept["interrupted"]) == (2, sentence)
    assert [row["chunks_an_episode"] for row in kept["rows"]] == [1, 1]


@pytest.mark.parametrize(
    ("ci95", "said"), [(None, "-10.0"), ((-0.1, -0.1), "-10.0"), ((-0.2, 0.05), "-10.0 (-20.0 to 5.0)")]
)
def test_episodes_that_are_all_alike_give_no_interval(ci95: tuple[float, float] | None, said: str) -> None:
    assert robot_success._points({"mean": -0.1, "ci95": ci95}) == said
