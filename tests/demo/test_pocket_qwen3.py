"""The pocket Qwen3-VL answers rightly, by looking; and a method must know what it drops."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from sinkprune import Pipeline
from sinkprune.calibration.evaluation.replies import BASELINE, Combination, Reply, collect_replies
from sinkprune.calibration.tasks import VARIED_SCENES, Item, load_task, with_grey_picture
from sinkprune.export.command import main as export

POCKET = Path(__file__).parents[2] / "demo" / "pocket-qwen3"
QUESTIONS = load_task(VARIED_SCENES)
EASY = ("existence-random", "colour", "shape", "size", "reading", "small-text")


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    path = tmp_path_factory.mktemp("pocket") / "bundle"
    plans = ("--methods", "sinkpruner,random", "--budgets", "prune-88.9")
    assert export([str(POCKET), "-o", str(path), *plans]) == 0
    return Pipeline.load(path)


def by_combination(replies: list[Reply]) -> dict[Combination, float]:
    right: dict[Combination, list[bool]] = {}
    for reply in replies:
        right.setdefault(reply.combination, []).append(reply.right)
    return {combination: fmean(answers) for combination, answers in right.items()}


def accuracy(pocket: Pipeline, items: list[Item]) -> float:
    return by_combination(collect_replies(pocket, items, []))[BASELINE]


def test_it_is_small_and_has_a_card() -> None:
    assert sum(file.stat().st_size for file in POCKET.iterdir()) < 16e6
    assert "license: apache-2.0" in (POCKET / "README.md").read_text(encoding="utf-8")
    assert (POCKET / "loss.csv").read_text(encoding="utf-8").startswith("step,stage,seconds,rate,")


def test_unpruned_it_is_right_overall_and_in_easy_kinds(pocket: Pipeline) -> None:
    assert accuracy(pocket, QUESTIONS[::20]) >= 0.8
    for kind in EASY:
        asked = [item for item in QUESTIONS if item.question.kind == kind]
        assert accuracy(pocket, asked[::10]) >= 0.8, kind


@pytest.mark.slow
def test_blind_it_is_near_chance(pocket: Pipeline) -> None:
    assert accuracy(pocket, [with_grey_picture(item) for item in QUESTIONS[::7]]) < 0.5


@pytest.mark.slow
def test_dropping_tokens_at_random_costs_answers(pocket: Pipeline) -> None:
    own, drawn = Combination("sinkpruner", "prune-88.9"), Combination("random", "prune-88.9")
    right = by_combination(collect_replies(pocket, QUESTIONS[::4], [own, drawn]))
    assert right[own] > right[drawn] + 0.1
    assert right[BASELINE] > right[drawn] + 0.2
