"""Ctrl-C while a calibration measures: the message names what was kept, and nothing half-written is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune.calibration import quantise
from sinkprune.calibration.commands import attention, norms
from sinkprune.runtime.pipeline import Pipeline
from support.programs.commands import interrupt_after, run, succeed

Bundles = Callable[..., Path]


def test_attention_is_reported_of_the_questions_that_were_asked(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "observe", interrupt_after(3, attention.observe))
    words = ("--data", scenes, "--limit", 4, "--budgets", "none")
    outcome = run("sinkprune-calibrate", "attention", bundle("gqa-112"), *words, "--json", tmp_path / "x.json")
    said = "the report counts the first 3 of 4 questions."
    assert outcome.code == 130 and outcome.stderr.endswith(f"interrupted; {said}\n")
    told = json.loads((tmp_path / "x.json").read_text())
    assert (told["questions"], told["interrupted"], told["warnings"][0]) == (3, said, f"Interrupted: {said}")


def test_norms_are_reported_of_whole_pictures(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "bundle_features", interrupt_after(1, norms.bundle_features))
    command = ("sinkprune-calibrate", "norms", bundle("gqa-112"), "--data", scenes.parent)
    outcome = run(*command, "--json", tmp_path / "x.json", "--heatmaps", tmp_path / "maps")
    said = "the report counts the first 1 of 2 pictures."
    assert outcome.code == 130 and outcome.stderr.endswith(f"interrupted; {said}\n")
    told = json.loads((tmp_path / "x.json").read_text())
    assert (told["pictures"], told["interrupted"], told["warnings"][0]) == (1, said, f"Interrupted: {said}")
    assert f"Interrupted: {said}" in outcome.stdout and "1 picture" in outcome.stdout
    assert len([*tmp_path.rglob("*.png")]) == 1
    none = run(*command, "--json", tmp_path / "y.json", "--heatmaps", tmp_path / "none")
    assert (none.code, none.stderr) == (130, "interrupted; no whole picture was measured, so nothing was kept.\n")
    assert not (tmp_path / "y.json").exists() and not (tmp_path / "none").exists()


def test_a_rounded_bundle_needs_all_layers(
    bundle: Bundles, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantise, "quantise_bundle", interrupt_after(0, quantise.quantise_bundle))
    words = ("--data", scenes, "-o", tmp_path / "out", "--weights", "int8")
    outcome = run("sinkprune-calibrate", "quantize", bundle("gqa-112"), *words)
    assert outcome.code == 130
    assert outcome.stderr.endswith("interrupted; no bundle was written: it needs all layers.\n")
    assert not (tmp_path / "out").exists()


ASKING = {"evaluate": ("sinkprune-evaluate",), "attention": ("sinkprune-calibrate", "attention")}


@pytest.mark.parametrize("command", ASKING)
def test_a_later_picture_is_noted_before_questions_are_asked(
    command: str, bundle: Bundles, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, data = [], tmp_path / "q.jsonl"
    for name, width in (("square.png", 100), ("wide.png", 200), ("wider.png", 400)):
        photo.resize((width, 100)).save(tmp_path / name)
        lines.append({"image": name, "question": "Is there a cup?", "answer": "a"})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(Pipeline, "generate", interrupt_after(0, Pipeline.generate))
    outcome = run(*ASKING[command], bundle("gqa-112"), "--data", data)
    assert outcome.code == 130
    seen = "wide.png: the model sees 50 % of the picture (the middle 100x100 of 200x100). --fit pad"
    assert outcome.stderr.startswith(f"{tmp_path}/{seen}")
    assert outcome.stderr.count("the model sees") == outcome.stderr.count(" 1 more picture is seen in part") == 1


@pytest.mark.parametrize("command", [*ASKING.values(), ("sinkprune-calibrate", "norms")], ids=" ".join)
def test_the_darkest_picture_of_16_bits_is_noted(command: tuple[str, ...], bundle: Bundles, tmp_path: Path) -> None:
    """A bright one is no help for it. A depth camera's first frame may be bright, and its later ones dark."""
    names, own, report = ["bright.png", "dark.png"], bundle("gqa-112"), tmp_path / "report.json"
    for name, value in zip(names, (257 * 200, 2570), strict=True):
        Image.fromarray(np.full((90, 90), value, np.uint16)).save(tmp_path / name)
    lines: list[object] = [{"image": name, "question": "Is there a cup?", "answer": "a"} for name in names]
    if "attention" in command:
        own = bundle("pi0", budgets=("prune-77.8", "prune-88.9"), max_images=2)
        lines = [{"cameras": names, "instruction": "pick up", "state": [0.0] * 5}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = tmp_path if "norms" in command else tmp_path / "q.jsonl"
    outcome = succeed(*command, own, "--data", data, "--json", report)
    dark = f"{tmp_path}/dark.png: 16 bits a channel were scaled to 8. The largest value is now 10 of 255."
    assert outcome.stderr.count("16 bits a channel") == 1 and dark in outcome.stderr
    if "attention" not in command:
        assert outcome.stderr.count(" 1 more file has 16 bits.\n") == 1
    (note,) = json.loads(report.read_text())["notes"]
    assert note in outcome.stderr.splitlines()
