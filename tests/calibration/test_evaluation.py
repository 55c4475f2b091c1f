"""The bookkeeping of the evaluation, on a stand-in with fixed replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sinkprune.calibration.evaluation.replies import (
    BASELINE,
    Combination,
    choose_combinations,
    collect_replies,
    evaluation_report,
)
from sinkprune.calibration.evaluation.statistics import Mean, PictureBootstrap, relative_accuracy, wilson
from sinkprune.calibration.tasks import Item
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.precision import WeightForms
from sinkprune.contract.questions import Question
from sinkprune.contract.report import Spread
from sinkprune.runtime.media.picture_warnings import PictureFacts

PLANS = {
    "sinkpruner": {"retain-64": None, "retain-32": None},
    "fastv": {"retain-64": None},
    "random": {"retain-32": None},
}
SINK, FASTV = Combination("sinkpruner", "retain-64"), Combination("fastv", "retain-64")

FP32 = WeightForms("fp32", "fp32", None)


class FakeManifest(SimpleNamespace):
    """Holds `PLANS`."""

    plans = PLANS

    def plan(self, method: str, budget: str) -> None:
        if method not in self.plans:
            raise BudgetError(f"no method '{method}'")


class FakePipeline:
    """Replies "yes" where `right(prompt, budget)` is true, and records its requests."""

    def __init__(self, right: Callable[[str, str], bool]) -> None:
        self.right = right
        self.asked: list[tuple[str, str, str]] = []
        checkpoint = SimpleNamespace(source="/models/pocket")
        self.bundle = SimpleNamespace(manifest=FakeManifest(precision="fp32", weights=FP32, checkpoint=checkpoint))
        self.backend = SimpleNamespace(
            name="fake", machine="a processor", threads=1, compute="fp32", versions={"fake": "1"}
        )

    def generate(self, image: Image.Image, prompt: str, *, method: str, budget: str, max_new_tokens: int) -> Any:
        self.asked.append((prompt, method, budget))
        layers = [576, 576, 576] if budget == "none" else [int(prompt), 20, 10]
        # Warm-up comes first and is slow.
        ms = 1e6 if len(self.asked) <= 3 else float(prompt)
        return SimpleNamespace(
            text="Yes." if self.right(prompt, budget) else "no",
            tokens_per_layer=layers,
            ms={"ttft": ms, "prefill": ms / 2, "latency": 2 * ms},
            kept=SimpleNamespace(layout=SimpleNamespace(seen_share=1.0)),
        )


def item(name: str, kind: str, words: str) -> Item:
    """A question about a picture of its own."""
    question = Question(name, kind, words, ("yes",))
    return Item(question, f"grey {name}", lambda: Image.new("RGB", (8, 6)), PictureFacts((8, 6)))


def items(count: int) -> list[Item]:
    """Questions "0", "1", ..., every third about reading."""
    return [item(f"q{n}", "reading" if n % 3 == 0 else "counting", str(n)) for n in range(count)]


RUN = {"task": "own.jsonl", "blind": False, "planted_outliers": False, "max_new_tokens": 8}


def run(pipeline: FakePipeline, questions: list[Item], combinations: list[Combination]) -> Any:
    return evaluation_report(pipeline, collect_replies(pipeline, questions, combinations), [], **RUN)


def test_combinations_take_turns_question_by_question() -> None:
    pipeline, told, warmed = FakePipeline(lambda prompt, budget: True), [], []
    collect_replies(pipeline, items(4), [SINK, FASTV], on_warm_up=warmed.append, on_run=told.append)
    assert (warmed, len(told)) == ([BASELINE, SINK, FASTV], 4 * 3)
    assert [prompt for prompt, _, _ in pipeline.asked] == ["0"] * 3 + ["0"] * 3 + ["1"] * 3 + ["2"] * 3 + ["3"] * 3
    rounds = [told[start : start + 3] for start in range(0, len(told), 3)]
    assert all(set(turn) == {BASELINE, SINK, FASTV} for turn in rounds)
    assert [turn[0] for turn in rounds] == [BASELINE, SINK, FASTV, BASELINE]
    assert {budget for _, method, budget in pipeline.asked if method == "fastv"} == {"retain-64"}
    # Warm-ups, which are slow, do not count.
    result = run(FakePipeline(lambda prompt, budget: True), items(4), [SINK, FASTV])
    assert (result.none.ttft_ms, result.none.prefill_ms) == (Spread(1.5, 3.0), Spread(0.75, 1.5))
    assert result.none.latency_ms == Spread(3.0, 6.0)


def test_accuracy_relative_kinds_and_tokens() -> None:
    # Of 12 questions the baseline has 9 right; sinkpruner 6, all of them among the nine.
    pipeline = FakePipeline(lambda prompt, budget: int(prompt) < (9 if budget == "none" else 6))
    result = run(pipeline, items(12), [SINK, FASTV])
    assert list(result.methods) == ["sinkpruner", "fastv"]
    assert (result.questions, result.none.accuracy, result.none.relative) == (12, 0.75, 1.0)
    assert result.none.relative_ci95 == (1.0, 1.0)
    pruned = result.methods["sinkpruner"]["retain-64"]
    assert (pruned.accuracy, pruned.relative) == (0.5, pytest.approx(2 / 3))
    # (0.5 + z^2/24 -+ z sqrt(0.25/12 + z^2/576)) / (1 + z^2/12), z = 1.959964
    assert pruned.ci95 == pytest.approx((0.253782, 0.746218), abs=1e-6)
    low, high = pruned.relative_ci95
    assert 0.2 < low < 2 / 3 < high < 1.0 + 1e-9
    # Right are 0 .. 5: of reading 0 and 3 of 0, 3, 6, 9; of counting 1, 2, 4, 5 of eight.
    kinds = {kind: (part.accuracy, part.count) for kind, part in pruned.by_kind.items()}
    assert kinds == {"reading": (0.5, 4), "counting": (0.5, 8)}
    # Over layers (n + 20 + 10) / 3, over questions n from 0 to 11
    assert pruned.mean_visual_tokens == pytest.approx((5.5 + 30) / 3)
    assert result.none.mean_visual_tokens == 576
    # FastV answers the same questions rightly.
    versus = result.methods["fastv"]["retain-64"].versus_first
    assert pruned.versus_first is None and versus == Mean(0.0, (0.0, 0.0))
    assert (result.model, result.versions["fake"]) == ("pocket", "1")


def test_chosen_combinations() -> None:
    reachable, unreachable = choose_combinations(FakeManifest(), [], [])
    assert reachable == [SINK, ("sinkpruner", "retain-32"), FASTV, ("random", "retain-32")]
    assert unreachable == [("fastv", "retain-32"), ("random", "retain-64")]
    twice = choose_combinations(FakeManifest(), ["fastv", "fastv"], ["none", "retain-64", "retain-64"])
    assert twice == ([FASTV], [])
    assert choose_combinations(FakeManifest(), ["fastv"], ["none"]) == ([], [])
    with pytest.raises(BudgetError, match=r"no budget 'retain-1'; .*It holds: none, retain-64, retain-32"):
        choose_combinations(FakeManifest(), [], ["retain-64", "retain-1"])
    with pytest.raises(BudgetError, match="no method 'tome'"):
        choose_combinations(FakeManifest(), ["sinkpruner", "tome"], [])
    with pytest.raises(BudgetError, match=r"none of the chosen methods.*'fastv' has: none, retain-64"):
        choose_combinations(FakeManifest(), ["fastv"], ["retain-32"])


def test_methods_are_compared_with_the_first_by_picture() -> None:
    # Of 40 questions sinkpruner misses the odd ones.
    pipeline = FakePipeline(lambda prompt, budget: True)
    replies = collect_replies(pipeline, items(40), [SINK, FASTV])
    replies = [
        replace(reply, right=reply.combination != SINK or number % 2 == 0, picture=f"{number // 4}")
        for reply in replies
        for number in [int(reply.id[1:])]
    ]
    result = evaluation_report(pipeline, replies, [], **RUN)
    # Each picture has two of four.
    assert result.pictures == 10
    assert result.methods["fastv"]["retain-64"].versus_first == Mean(0.5, pytest.approx((0.5, 0.5)))


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # No right answer: the low end is 0, the high end z^2 / (n + z^2).
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        # Newcombe 1998, table I
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilson(right: int, count: int, low: float, high: float) -> None:
    assert wilson(right, count) == pytest.approx((low, high), abs=5e-5)
    assert 0.0 <= wilson(right, count)[0] <= right / count <= wilson(right, count)[1] <= 1.0


def test_relative_accuracy() -> None:
    base = np.array([True, True, True, True, False])
    assert relative_accuracy(np.array([True, True, True, False, False]), base) == 0.75
    assert relative_accuracy(base, ~np.ones(5, bool)) is None
    assert relative_accuracy(np.ones(5, bool), base) == 1.25


def test_the_bootstrap_equals_all_resamples_of_a_small_set() -> None:
    right, base = np.array([True, False, True, False]), np.array([True, True, False, True])
    ratios = [
        sum(right[i] for i in chosen) / sum(base[i] for i in chosen)
        for chosen in product(range(4), repeat=4)
        if any(base[i] for i in chosen)
    ]
    # Each question has a picture of its own.
    found = PictureBootstrap([*"0123"]).relative(right, base)
    assert found == pytest.approx(np.quantile(ratios, [0.025, 0.975]), abs=0.02)


def test_pictures_are_resampled_with_all_their_questions() -> None:
    rng = np.random.default_rng(1)
    pictures = [f"picture {number}" for number in range(40) for _ in range(1 + number % 3)]
    own = dict(zip(dict.fromkeys(pictures), rng.normal(size=40), strict=True))
    values = [own[picture] for picture in pictures]
    found = PictureBootstrap(pictures)(values)
    assert found.mean == pytest.approx(np.mean(values))
    groups = [[own[name]] * pictures.count(name) for name in own]
    means = []
    for _ in range(5000):
        drawn = [value for place in rng.integers(40, size=40) for value in groups[place]]
        means.append(sum(drawn) / len(drawn))
    assert found.ci95 == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.05)
    # Taken for independent, three questions about a picture would promise too much.
    threefold = PictureBootstrap([name for name in own for _ in range(3)])([own[name] for name in own for _ in "abc"])
    once = PictureBootstrap([*own])([*own.values()])
    assert threefold.ci95 == pytest.approx(once.ci95)


@given(st.floats(0, 1), st.integers(1, 40), st.integers(1, 3))
def test_a_mean_lies_in_its_interval(value: float, pictures: int, questions: int) -> None:
    """Also where rounding is all that differs: resamples add equal values in another order."""
    found = PictureBootstrap([str(number % pictures) for number in range(pictures * questions)])(
        [value] * pictures * questions
    )
    assert (found.ci95 is None) == (pictures == 1)
    low, high = found.ci95 or (found.mean, found.mean)
    assert low <= found.mean <= high == pytest.approx(low)
