"""The pocket model answers rightly, by looking, in both precisions; and pruning at random costs it its answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.replies import (
    BASELINE,
    Combination,
    CombinationReport,
    Reply,
    collect_replies,
    evaluation_report,
)
from sinkprune.calibration.tasks import load_task, with_grey_picture
from sinkprune.demo.write_scenes import write_scenes
from sinkprune.export.command import main as export
from support.programs.commands import run

DEMO = Path(__file__).parents[2] / "demo"
POCKET = DEMO / "pocket"
QUESTIONS = load_task("scenes")

Pocket = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Pocket:
    """The pocket model at a precision, exported once."""
    made: dict[str, Pipeline] = {}

    def get(precision: str) -> Pipeline:
        if precision not in made:
            path = tmp_path_factory.mktemp("pocket") / precision
            methods = ("--methods", "sinkpruner,random", "--budgets", "retain-64,retain-32")
            assert export([str(POCKET), "-o", str(path), "--precision", precision, *methods]) == 0
            made[precision] = Pipeline.load(path)
        return made[precision]

    return get


def evaluated(pipeline: Pipeline, replies: list[Reply]) -> CombinationReport:
    return evaluation_report(
        pipeline, replies, [], task="scenes", blind=False, planted_outliers=False, max_new_tokens=8
    ).none


def test_it_is_small_and_has_a_card() -> None:
    assert sum(file.stat().st_size for file in POCKET.iterdir()) < 16e6
    card = (POCKET / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card
    assert (POCKET / "loss.csv").read_text(encoding="utf-8").startswith("step,stage,rate,probe,names,looks,answers\n")


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_unpruned_it_is_right_overall_and_in_every_kind(every: int, pocket: Pocket) -> None:
    result = evaluated(pocket("fp32"), collect_replies(pocket("fp32"), QUESTIONS[::every], []))
    assert result.accuracy >= 0.90
    assert {kind: part.accuracy for kind, part in result.by_kind.items() if part.accuracy < 0.75} == {}


@pytest.mark.slow
def test_blind_it_is_near_chance(pocket: Pocket) -> None:
    """Chance: a half for yes, no, small and large, a quarter for choices, less elsewhere."""
    blind = [with_grey_picture(item) for item in QUESTIONS[::11]]
    result = evaluated(pocket("fp32"), collect_replies(pocket("fp32"), blind, []))
    assert result.accuracy < 0.5
    assert result.by_kind["reading"].accuracy < 0.2
    assert result.by_kind["existence-adversarial"].accuracy < 0.75


@pytest.mark.slow
def test_dropping_tokens_at_random_costs_answers(pocket: Pocket) -> None:
    """At few tokens a method must know what it drops, or the test would say nothing about methods."""
    own, drawn = Combination("sinkpruner", "retain-32"), Combination("random", "retain-32")
    right: dict[Combination, list[bool]] = {own: [], drawn: []}
    for reply in collect_replies(pocket("fp32"), QUESTIONS[::4], [own, drawn]):
        right.setdefault(reply.combination, []).append(reply.right)
    assert fmean(right[own]) > fmean(right[drawn]) + 0.15
    assert fmean(right[BASELINE]) > fmean(right[drawn]) + 0.3


def test_what_the_demo_asks_is_answered_rightly(pocket: Pocket) -> None:
    script = (DEMO / "demo.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    asked = re.findall(r'sinkprune-run .*scene-(\d+)\.png" --prompt "([^"]+)"(?: +--budget (\S+))?', script)
    assert len(asked) == script.count("step sinkprune-run") >= 3
    for scene, text, budget in asked:
        (item,) = (
            item
            for item in QUESTIONS
            if item.question.text == text and item.question.id.startswith(f"scene-{int(scene):03}-")
        )
        answer = pocket("fp32").generate(item.load_image(), text, budget=budget or "none", max_new_tokens=8)
        assert item.question.is_right(answer.text), f"{text}: {answer.text}"


def test_the_demo_overwrites_only_what_it_wrote(tmp_path: Path) -> None:
    programs, out = tmp_path / "programs", tmp_path / "out"
    programs.mkdir()
    # Each writes what its options name.
    stand_in = """#!/usr/bin/env bash
for word in "$@"; do
    case $last in
        -o) mkdir -p "$word"; echo "$RANDOM" >"$word/bundle.json" ;;
        --overlay|--json|--plot) echo "$RANDOM" >"$word" ;;
    esac
    last=$word
done
"""
    for name in ("export", "run", "profile", "evaluate"):
        (programs / f"sinkprune-{name}").write_text(stand_in)
        (programs / f"sinkprune-{name}").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])

    def demo() -> subprocess.CompletedProcess[str]:
        words = ["bash", str(DEMO / "demo.sh"), str(out)]
        return subprocess.run(words, env={**os.environ, "PATH": path}, capture_output=True, text=True)

    assert demo().returncode == 0
    bundle = (out / "bundle" / "bundle.json").read_bytes()
    assert demo().returncode == 0 and (out / "bundle" / "bundle.json").read_bytes() == bundle
    mine = ("kitchen.jsonl", "profile.json", "frames/03.jpg")
    for name in mine:
        (out / name).write_text("mine")
    drawn = (out / "kept.png").read_bytes()
    refused = demo()
    assert refused.returncode == 2 and refused.stderr.startswith("error: the demo did not write "), refused
    assert all(name in refused.stderr and (out / name).read_text() == "mine" for name in mine)
    assert "scene" not in refused.stderr and (out / "kept.png").read_bytes() == drawn


def test_its_scenes_can_be_written_and_evaluated(pocket: Pocket, tmp_path: Path) -> None:
    write_scenes(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scene-0.png", "scene-1.png", "scenes.jsonl"]
    written = load_task(str(tmp_path / "scenes.jsonl"))
    originals = list(islice(QUESTIONS, len(written)))
    assert [item.question for item in written] == [item.question for item in originals]
    assert written[-1].load_image().tobytes() == originals[-1].load_image().tobytes()
    outcome = run(
        "sinkprune-evaluate", pocket("fp32").bundle.path, "--data", tmp_path / "scenes.jsonl", "--budgets", "none"
    )
    assert outcome.code == 0, outcome.stderr
