"""The pocket models answer rightly, by looking; and pruning at random costs them their answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

import pytest

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.replies import BASELINE, Combination, Reply, collect_replies
from sinkprune.calibration.tasks import VARIED_SCENES, load_task, with_grey_picture
from sinkprune.export.command import main as export

DEMO = Path(__file__).parents[2] / "demo"
QUESTIONS = {"pocket": load_task("scenes"), "pocket-qwen3": load_task(VARIED_SCENES)}
SMALLEST = {"pocket": "retain-32", "pocket-qwen3": "prune-88.9"}
EASY = ("existence-random", "colour", "shape", "size", "reading", "small-text")

Pocket = Callable[[str], Pipeline]


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Pocket:
    """A pocket model by its name, exported once."""
    made: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in made:
            path = tmp_path_factory.mktemp("pocket") / name
            budgets = {"pocket": "retain-64,retain-32"}.get(name, SMALLEST[name])
            plans = ("--methods", "sinkpruner,random", "--budgets", budgets)
            assert export([str(DEMO / name), "-o", str(path), *plans]) == 0
            made[name] = Pipeline.load(path)
        return made[name]

    return get


def accuracy(replies: Iterable[Reply]) -> float:
    """Return the share of right replies."""
    return fmean(reply.right for reply in replies)


@pytest.mark.parametrize(
    ("name", "every", "overall", "each"),
    [
        ("pocket", 12, 0.9, 0.75),
        pytest.param("pocket", 1, 0.9, 0.75, marks=pytest.mark.slow),
        ("pocket-qwen3", 10, 0.8, 0.8),
    ],
)
def test_unpruned_it_is_right_overall_and_in_every_kind(
    name: str, every: int, overall: float, each: float, pocket: Pocket
) -> None:
    """Of the pocket Qwen3-VL in easy kinds."""
    replies = collect_replies(pocket(name), QUESTIONS[name][::every], [])
    assert accuracy(replies) >= overall
    for kind in EASY if name == "pocket-qwen3" else {reply.kind for reply in replies}:
        assert accuracy(reply for reply in replies if reply.kind == kind) >= each, kind


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_blind_it_is_near_chance(name: str, pocket: Pocket) -> None:
    """Chance: a half for yes, no, small and large, a quarter for choices, less elsewhere."""
    blind = [with_grey_picture(item) for item in QUESTIONS[name][::7]]
    replies = collect_replies(pocket(name), blind, [])
    assert accuracy(replies) < 0.5
    for kind, most in (("reading", 0.2), ("existence-adversarial", 0.75)) if name == "pocket" else ():
        assert accuracy(reply for reply in replies if reply.kind == kind) < most


@pytest.mark.slow
@pytest.mark.parametrize(("name", "less", "least"), [("pocket", 0.15, 0.3), ("pocket-qwen3", 0.1, 0.2)])
def test_dropping_tokens_at_random_costs_answers(name: str, less: float, least: float, pocket: Pocket) -> None:
    """At few tokens a method must know what it drops, or the test would say nothing about methods."""
    own, drawn = (Combination(method, SMALLEST[name]) for method in ("sinkpruner", "random"))
    replies = collect_replies(pocket(name), QUESTIONS[name][::4], [own, drawn])
    whole, known, random = (accuracy(r for r in replies if r.combination == each) for each in (BASELINE, own, drawn))
    assert known > random + less
    assert whole > random + least


def test_what_the_demo_asks_is_answered_rightly(pocket: Pocket) -> None:
    script = (DEMO / "demo.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    asked = re.findall(r'sinkprune-run .*scene-(\d+)\.png" --prompt "([^"]+)"(?: +--budget (\S+))?', script)
    assert len(asked) == script.count("step sinkprune-run") >= 3
    for scene, text, budget in asked:
        (item,) = (
            item
            for item in QUESTIONS["pocket"]
            if item.question.text == text and item.question.id.startswith(f"scene-{int(scene):03}-")
        )
        answer = pocket("pocket").generate(item.load_image(), text, budget=budget or "none", max_new_tokens=8)
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
