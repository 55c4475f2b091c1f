"""Ctrl-C while a calibration measures: the message names what was kept, and nothing half-written is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from sinkprune.calibration.commands import attention, norms
from sinkprune.calibration.quantising import quantise
from sinkprune.demo.write_scenes import write_scenes
from support.programs.commands import run

Bundles = Callable[..., Path]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about two scenes."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, 2, "validation")
    return folder


def interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_heads_need_all_questions(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "choose_heads", interrupted)
    words = ("--data", scenes / "scenes.jsonl", "--limit", 4, "--budgets", "none", "--heads", tmp_path / "heads.json")
    outcome = run("sinkprune-calibrate", "attention", bundle("gqa-112"), *words, "--json", tmp_path / "x.json")
    assert outcome.code == 130
    counts = "the report counts the first 4 of 4 questions. No heads were chosen: they need all questions."
    assert outcome.stderr.endswith(f"interrupted; {counts}\n")
    assert json.loads((tmp_path / "x.json").read_text())["interrupted"] == counts
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_attention_is_reported_of_whole_questions(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The unpruned model and one budget: two whole questions, and half of the third.
    left, plain = iter(range(5)), attention.observe

    def observe(*given: object) -> object:
        return plain(*given) if next(left, None) is not None else interrupted()  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "observe", observe)
    words = ("--data", scenes / "scenes.jsonl", "--budgets", "retain-64", "--json", tmp_path / "x.json")
    bundle_of_one = bundle("gqa-112", budgets=("retain-64",))
    whole = run("sinkprune-calibrate", "attention", bundle_of_one, *words, "--limit", 4)
    assert whole.code == 130
    said = "the report counts the first 2 of 4 questions."
    assert whole.stderr.endswith(f"interrupted; {said}\n")
    told = json.loads((tmp_path / "x.json").read_text())
    assert (told["questions"], told["interrupted"], told["warnings"][0]) == (2, said, f"Interrupted: {said}")
    assert set(told["methods"]) == {"sinkpruner"} and "retain-64" in whole.stdout
    # What was measured before stays.
    left = iter(range(3))
    again = run("sinkprune-calibrate", "attention", bundle_of_one, *words, "--limit", 4)
    assert again.code == 130 and "Earlier files stay; these results are in '" in again.stderr
    assert json.loads((tmp_path / "x.interrupted.json").read_text())["questions"] == 1
    left = iter(range(5))
    third = run("sinkprune-calibrate", "attention", bundle_of_one, *words, "--limit", 4)
    assert third.stderr.endswith(f"these results are in '{tmp_path}/x.interrupted-2.json'.\n")
    kept = {path.name: json.loads(path.read_text())["questions"] for path in tmp_path.iterdir()}
    assert kept == {"x.json": 2, "x.interrupted.json": 1, "x.interrupted-2.json": 2}
    monkeypatch.setattr(attention, "observe", plain)
    assert run("sinkprune-calibrate", "attention", bundle_of_one, *words, "--limit", 1).code == 0
    assert json.loads((tmp_path / "x.json").read_text())["interrupted"] is None


@pytest.mark.parametrize("drawn", [False, True])
def test_norms_are_reported_of_whole_pictures(
    drawn: bool, bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, plain = iter(range(1)), norms.bundle_features

    def features(*given: object) -> object:
        return plain(*given) if next(left, None) is not None else interrupted()  # type: ignore[arg-type]

    monkeypatch.setattr(norms, "bundle_features", features)
    maps = ("--heatmaps", tmp_path / "maps") if drawn else ()
    command = ("sinkprune-calibrate", "norms", bundle("gqa-112"), "--data", scenes)
    outcome = run(*command, "--json", tmp_path / "x.json", *maps)
    said = "the report counts the first 1 of 2 pictures."
    assert outcome.code == 130 and outcome.stderr.endswith(f"interrupted; {said}\n")
    told = json.loads((tmp_path / "x.json").read_text())
    assert (told["pictures"], told["interrupted"], told["warnings"][0]) == (1, said, f"Interrupted: {said}")
    assert f"Interrupted: {said}" in outcome.stdout and "1 picture" in outcome.stdout
    assert len([*tmp_path.rglob("*.png")]) == drawn
    none = run(*command, "--json", tmp_path / "y.json", *(("--heatmaps", tmp_path / "none") if drawn else ()))
    assert (none.code, none.stderr) == (130, "interrupted; no whole picture was measured, so nothing was kept.\n")
    assert not (tmp_path / "y.json").exists() and not (tmp_path / "none").exists()
    monkeypatch.setattr(norms, "bundle_features", plain)
    whole = json.loads(run(*command, "--limit", 1, "--json").stdout)
    assert whole.pop("interrupted") is None and told.pop("interrupted") == said
    assert whole == {**told, "warnings": told["warnings"][1:]}


def test_a_rounded_bundle_needs_all_layers(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "quantise_bundle", interrupted)
    words = ("--data", scenes / "scenes.jsonl", "-o", tmp_path / "out", "--weights", "int8")
    outcome = run("sinkprune-calibrate", "quantize", bundle("gqa-112"), *words)
    assert outcome.code == 130
    assert outcome.stderr.endswith("interrupted; no bundle was written: it needs all layers.\n")
    assert not (tmp_path / "out").exists()
