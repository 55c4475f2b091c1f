"""Ctrl-C while a calibration measures: the message names what was kept, and nothing half-written is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from sinkprune.calibration.commands import attention, evidence, norms
from sinkprune.calibration.quantising import quantise
from sinkprune.demo.write_scenes import write_scenes
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
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
    assert outcome.stderr.endswith("interrupted; nothing was kept: the report needs all questions.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("drawn", [False, True])
def test_norms_need_all_pictures(
    drawn: bool, bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, plain = iter(range(1)), norms.bundle_features

    def features(*given: object) -> object:
        return plain(*given) if next(left, None) is not None else interrupted()  # type: ignore[arg-type]

    monkeypatch.setattr(norms, "bundle_features", features)
    maps = ("--heatmaps", tmp_path / "maps") if drawn else ()
    words = ("--data", scenes, "--json", tmp_path / "x.json", *maps)
    outcome = run("sinkprune-calibrate", "norms", bundle("gqa-112"), *words)
    said = "no norms were kept: the report needs all pictures." + drawn * " Heatmaps that are drawn stay."
    assert (outcome.code, outcome.stderr) == (130, f"interrupted; {said}\n")
    assert len([*tmp_path.rglob("*.png")]) == drawn and not (tmp_path / "x.json").exists()


def test_thresholds_need_all_questions(
    checkpoint: Callable[[str], Path], scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = ("sinkpruner", "occamtoken")
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), ("retain-64",), methods), tmp_path / "bundle")
    before = (tmp_path / "bundle" / "bundle.json").read_bytes()
    monkeypatch.setattr(evidence, "find_thresholds", interrupted)
    outcome = run("sinkprune-calibrate", "evidence", tmp_path / "bundle", "--data", scenes / "scenes.jsonl")
    said = "nothing was kept, and the bundle is unchanged: thresholds need all questions."
    assert (outcome.code, outcome.stderr) == (130, f"interrupted; {said}\n")
    assert (tmp_path / "bundle" / "bundle.json").read_bytes() == before


def test_a_rounded_bundle_needs_all_layers(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "quantise_bundle", interrupted)
    words = ("--data", scenes / "scenes.jsonl", "-o", tmp_path / "out", "--weights", "int8")
    outcome = run("sinkprune-calibrate", "quantize", bundle("gqa-112"), *words)
    assert outcome.code == 130
    assert outcome.stderr.endswith("interrupted; no bundle was written: it needs all layers.\n")
    assert not (tmp_path / "out").exists()
