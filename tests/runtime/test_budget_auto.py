"""Budget `auto`: closed lists at larger and larger budgets, each step with the answer of a whole request."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import (
    BudgetError,
    Pipeline,
    PromptError,
    Session,
    Thresholds,
    UsageError,
    read_thresholds,
    write_thresholds,
)
from sinkprune.contract.plans import Plan
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.commands.run import main as run
from sinkprune.runtime.confidence.thresholds import describe_ladders
from sinkprune.runtime.steps.decoding import Prefill
from sinkprune.runtime.steps.encoding import EncodedPicture
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.prefix_cache import ladders
from support.references.steps import Watched

QUESTION, OTHER = "What is on the table?", "Is the cup full, and where is it?"
LADDER = ("retain-32+from-retain-128", "retain-64+from-retain-128", "retain-128")
APART = ("retain-32", "retain-64")
LIST = ["a", "b", "c"]
LONG = ["a red cup", "a green cup", "nothing"]


class Steps(Observer):
    """Keeps the sets that each step kept."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._encoded = backend, list[list[int]]()
        self.kept: list[list[list[int]]] = []

    def encoded(self, pictures: Sequence[EncodedPicture]) -> None:
        self._encoded = [picture.kept_index.ravel().tolist() for picture in pictures]

    def prefilled(self, result: Prefill) -> None:
        stages = [self._backend.numpy(rows).ravel().tolist() for rows in result.keep_index.values()]
        self.kept.append([*self._encoded, *stages])


class Calls:
    """Counts the calls of each graph of a pipeline."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        def counted(inputs: Any) -> Any:
            self.counts[graph] += 1
            return engine(inputs)

        return counted

    def of(self, ask: Callable[[], object]) -> Counter[str]:
        self.counts.clear()
        ask()
        return Counter(self.counts)


def with_thresholds(pipe: Pipeline, budgets: Sequence[str], least: float = math.inf) -> Pipeline:
    pipe.thresholds = Thresholds(
        1, pipe.bundle.sha256, pipe.backend.compute, "sinkpruner", dict.fromkeys(budgets, least)
    )
    return pipe


def assert_each_step_is_whole(pipe: Pipeline, picture: Any, question: Any = QUESTION, choice: Any = LIST) -> None:
    """Ask at every budget of the thresholds: each step keeps and answers what a request at its budget does."""
    steps = Steps(pipe.backend)
    answer = pipe.generate(picture, question, budget="auto", choice=choice, observer=steps)
    assert pipe.thresholds is not None
    assert [step.budget for step in answer.tried] == [*pipe.thresholds.least]
    for step, kept in zip(answer.tried, steps.kept, strict=True):
        alone = Steps(pipe.backend)
        fresh = pipe.generate(picture, question, budget=step.budget, choice=choice, observer=alone)
        assert [kept] == alone.kept
        assert [*step.choices] == [*fresh.choices]
        np.testing.assert_allclose([*step.choices.values()], [*fresh.choices.values()], atol=1e-5)
        assert step.confidence == max(step.choices.values())
    assert (answer.text, answer.budget, answer.choices) == (fresh.text, fresh.budget, answer.tried[-1].choices)
    assert answer.tokens_per_layer == fresh.tokens_per_layer and answer.kv_bytes == fresh.kv_bytes


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino", "ort-cpu+openvino", "ort-cpu of opset20"])
def test_each_step_is_a_whole_request_on_every_backend(
    backend: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    backend, _, dialect = backend.partition(" of ")
    path, calls = bundle("gqa-112", "fp32", (*LADDER, *APART), dialect or "opset24"), Calls()
    pipe = Pipeline.load(path, backend=backend, compute="fp32", threads=1, wrap=calls.wrap)
    assert ladders(pipe.bundle.manifest, "sinkpruner") == [[*LADDER]]
    with_thresholds(pipe, [*LADDER, "none"])
    assert_each_step_is_whole(pipe, photo)
    assert_each_step_is_whole(pipe, photo, OTHER, LONG)
    # Passes after the prompt, which compare the list.
    passes = calls.of(lambda: pipe.generate(photo, QUESTION, budget="none", choice=LIST))["head"] - 1
    counts = calls.of(lambda: pipe.generate(photo, QUESTION, budget="auto", choice=LIST))
    # Once for the ladder, and once unpruned.
    assert (counts["vision"], counts["projector"], counts["decoder_0"]) == (1, 2, 2 + 4 * passes)
    assert counts["decoder_1"] == counts["head"] == 4 + 4 * passes
    with_thresholds(pipe, [*APART, *LADDER[:2]])
    assert_each_step_is_whole(pipe, photo)
    counts = calls.of(lambda: pipe.generate(photo, QUESTION, budget="auto", choice=LIST))
    # Budgets of different sanitizers share the tower only.
    assert (counts["vision"], counts["projector"], counts["decoder_0"]) == (1, 3, 3 + 4 * passes)
    assert counts["decoder_1"] == 4 + 4 * passes


@pytest.mark.parametrize("name", ["qwen-tied", "qwen3-vl"])
def test_each_step_is_a_whole_request_of_qwen(
    name: str, pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    pipe = pipeline(name, "fp32", ("prune-66.7", "prune-77.8", "prune-88.9"))
    assert ladders(pipe.bundle.manifest, "sinkpruner") == [["prune-66.7", "prune-77.8"]]
    with_thresholds(pipe, ["prune-88.9", "prune-77.8", "prune-66.7", "none"])
    assert_each_step_is_whole(pipe, photo.resize((300, 200)))


def test_each_step_is_a_whole_request_about_several_pictures(
    pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    pipe = with_thresholds(pipeline("gqa-112", "fp32", LADDER, max_images=3), LADDER)
    assert_each_step_is_whole(pipe, [photo, photo.rotate(90)], ["First:", "Second:", QUESTION], LONG)


@pytest.fixture
def counted(bundle: Callable[..., Path]) -> tuple[Pipeline, Calls]:
    calls = Calls()
    pipe = Pipeline.load(bundle("gqa-112", "fp32", (*LADDER, *APART)), threads=1, wrap=calls.wrap)
    return with_thresholds(pipe, [*LADDER, "none"]), calls


def test_an_answer_that_is_sure_enough_stands(counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    pipe, _ = counted
    every = pipe.generate(photo, QUESTION, budget="auto", choice=LIST).tried
    for last, step in enumerate(every):
        # The threshold itself is sure enough.
        least = dict.fromkeys((one.budget for one in every[:last]), math.inf) | {step.budget: step.confidence}
        assert pipe.thresholds is not None
        pipe.thresholds = replace(
            pipe.thresholds, least={**least, **dict.fromkeys([*LADDER, "none"][last + 1 :], 0.0)}
        )
        stream = pipe.stream(photo, QUESTION, budget="auto", choice=LIST)
        assert "".join(stream) == stream.answer.text
        assert [one.budget for one in stream.answer.tried] == [one.budget for one in every[: last + 1]]
        assert stream.answer.budget == step.budget == stream.budget
        if step is not every[-1]:
            above = math.nextafter(step.confidence, 2)
            pipe.thresholds = replace(pipe.thresholds, least={**pipe.thresholds.least, step.budget: above})
            assert len(pipe.generate(photo, QUESTION, budget="auto", choice=LIST).tried) == last + 2


def test_time_to_first_token_counts_every_step(counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    pipe, _ = counted
    answer = pipe.generate(photo, QUESTION, budget="auto", choice=LONG)
    ms, steps = {name: value or 0.0 for name, value in answer.ms.items()}, [step.ms for step in answer.tried]
    assert sum(steps) == pytest.approx(ms["latency"]) and min(steps) > 0
    assert sum(steps[:-1]) < ms["ttft"] < ms["latency"]
    parts = ("preprocess", "vision", "sanitizer", "projector", "prefill", "rest")
    assert sum(ms[part] for part in parts) == pytest.approx(ms["ttft"]) and min(ms[part] for part in parts) > 0


@pytest.mark.parametrize("most", [0, 1 << 28])
def test_sessions_share_the_same_picture_only(most: int, counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    pipe, calls = counted
    pictures, session = [photo, photo.rotate(90)], Session(pipe, max_bytes=most)
    expected = [pipe.generate(one, QUESTION, budget="auto", choice=LIST) for one in pictures]
    assert expected[0].choices != expected[1].choices
    passes = calls.of(lambda: pipe.generate(photo, QUESTION, budget="none", choice=LIST))["head"] - 1
    for first in (True, False):
        for picture, whole in zip(pictures, expected, strict=True):
            if first:
                session.generate(picture, OTHER, budget="auto", choice=LIST)
            calls.counts.clear()
            found = session.generate(picture, QUESTION, budget="auto", choice=LIST)
            assert found.budget == "none" and len(found.tried) == 4
            for step, other in zip(found.tried, whole.tried, strict=True):
                np.testing.assert_allclose([*step.choices.values()], [*other.choices.values()], atol=1e-5)
            assert (calls.counts["vision"], found.reused_towers) == ((0, 1) if most else (1, 0))
            assert (found.tried[0].reused_rows > 0) == bool(most)
            # Once for the ladder, for the question's own words in a session, and once unpruned.
            assert calls.counts["decoder_0"] == 2 + 4 * passes


def test_the_same_question_again_runs_nothing_before_the_select(
    counted: tuple[Pipeline, Calls], photo: Image.Image
) -> None:
    pipe, calls = counted
    session, steps = Session(pipe), Watched()
    session.generate(photo, QUESTION, budget="retain-64", max_new_tokens=1)
    calls.counts.clear()
    session.generate(photo, QUESTION, budget="retain-64", max_new_tokens=1, observer=steps)
    assert calls.counts["decoder_0"] == 0 and calls.counts["decoder_1"] == 1
    assert steps.answer.reused_rows == steps.rows.length
    whole = Watched()
    pipe.generate(photo, QUESTION, budget="retain-64", max_new_tokens=1, observer=whole)
    np.testing.assert_allclose(steps.logits[0], whole.logits[0], atol=1e-3 * np.abs(whole.logits[0]).max())


def test_a_sample_is_that_of_a_whole_request(counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    pipe, _ = counted
    for seed in range(4):
        options = {"choice": LIST, "temperature": 1.0, "seed": seed}
        answer = pipe.generate(photo, QUESTION, budget="auto", **options)
        assert answer.text == pipe.generate(photo, QUESTION, budget="none", **options).text
        assert answer.tried[-1].confidence == max(answer.choices.values())


def test_a_cancelled_request_keeps_its_last_step(counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    pipe, _ = counted
    stream = pipe.stream(photo, QUESTION, budget="auto", choice=LIST)
    while stream.budget != LADDER[1]:
        assert stream.step() is None
    stream.cancel()
    answer = stream.rest()
    assert (answer.finish, answer.budget, len(answer.tried)) == ("cancelled", LADDER[1], 2)
    assert answer.text in LIST


def test_a_budget_that_cannot_run_is_left_out(counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    """At a prompt near the model's positions only the smallest budgets fit."""
    pipe, _ = counted
    most = pipe.bundle.manifest.language_model.max_positions
    small = pipe.generate(photo, QUESTION, budget=LADDER[0], choice=LIST)
    words = "x " * ((most - small.prompt_tokens - small.tokens_per_layer[0] - 8) // 2)
    for extra in range(400):
        question = words + "x " * extra + QUESTION
        try:
            answer = pipe.generate(photo, question, budget="auto", choice=LIST)
        except PromptError:
            break
        if len(answer.tried) < 4:
            assert answer.budget != "none"
            return
    pytest.fail("no prompt left out a budget")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "closed list"),
        ({"choice": LIST, "deadline_ms": 1000}, "a deadline limits it"),
        ({"regex": "[0-9]"}, "closed list"),
    ],
)
def test_requests_that_auto_does_not_answer(
    options: dict[str, object], message: str, counted: tuple[Pipeline, Calls], photo: Image.Image
) -> None:
    with pytest.raises(UsageError, match=message):
        counted[0].stream(photo, QUESTION, budget="auto", **options)


def test_auto_needs_thresholds_of_its_own_bundle(counted: tuple[Pipeline, Calls], photo: Image.Image) -> None:
    pipe, _ = counted
    good = pipe.thresholds
    assert good is not None
    wrong: list[tuple[Thresholds | None, type[Exception], str]] = [
        (None, UsageError, r"sinkprune-calibrate confidence .* share a sanitizer.*: retain-32\+from-retain-128, "),
        (replace(good, bundle_sha256="0" * 64), UsageError, "0000' *, and this bundle's is"),
        (replace(good, compute="bf16"), UsageError, "compute in 'bf16'"),
        (replace(good, method="fastv"), UsageError, "of method 'fastv'"),
        (replace(good, least={"retain-9": 0.5, "none": 0}), BudgetError, "retain-9"),
    ]
    for thresholds, error, message in wrong:
        pipe.thresholds = thresholds
        with pytest.raises(error, match=message):
            pipe.stream(photo, QUESTION, budget="auto", choice=LIST)
    with pytest.raises(BudgetError, match="sinkprune-run and sinkprune-serve"):
        pipe.bundle.manifest.plan("sinkpruner", "auto")


def test_a_file_of_thresholds(tmp_path: Path) -> None:
    found = Thresholds(1, "0" * 64, "fp32", "sinkpruner", {"retain-64": 0.9, "none": 0.0})
    write_thresholds(tmp_path / "t.json", found)
    assert read_thresholds(tmp_path / "t.json") == found
    data = json.loads((tmp_path / "t.json").read_text())
    assert [*data["least"]] == ["retain-64", "none"]
    for change, message in (
        ({"thresholds_version": 2}, "version 2"),
        ({"thresholds_version": None}, "no file of thresholds"),
        ({"least": {"retain-64": 1.5}}, "malformed"),
        ({"least": {"retain-64": True}}, "malformed"),
        ({"least": {}}, "name no budget"),
        ({"more": 1}, "malformed"),
    ):
        (tmp_path / "wrong.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(UsageError, match=message):
            read_thresholds(tmp_path / "wrong.json")
    (tmp_path / "wrong.json").write_text("[]")
    with pytest.raises(UsageError, match="no file of thresholds"):
        read_thresholds(tmp_path / "wrong.json")
    with pytest.raises(UsageError, match="sinkprune-calibrate confidence"):
        read_thresholds(tmp_path / "missing.json")


def test_ladders_are_plans_with_one_sanitizer_and_one_first_cut(counted: tuple[Pipeline, Calls]) -> None:
    manifest = counted[0].bundle.manifest
    plans = dict(manifest.plans["sinkpruner"])

    def later(plan: Plan) -> Plan:
        return replace(plan, select_after=dict([*plan.select_after.items()][1:]))

    plans["later"] = later(plans["retain-128"])
    changed = replace(manifest, plans={"sinkpruner": plans})
    assert ladders(changed, "sinkpruner") == [[*LADDER]]
    plans["again"] = replace(plans["retain-32"], positions="compact")
    assert ladders(changed, "sinkpruner") == [[*LADDER], ["retain-32", "again"]]
    alone = replace(manifest, plans={"sinkpruner": {"retain-32": plans["retain-32"]}})
    assert "share the vision tower only" in describe_ladders(alone, "sinkpruner")


def test_the_command_answers_and_reports_what_it_tried(
    counted: tuple[Pipeline, Calls], photo: Image.Image, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, _ = counted
    photo.save(tmp_path / "photo.png")
    assert pipe.thresholds is not None
    least = {LADDER[0]: 1.0, "none": 0.0}
    write_thresholds(tmp_path / "t.json", replace(pipe.thresholds, least=least))
    words = [str(pipe.bundle.path), "--image", str(tmp_path / "photo.png"), "--prompt", QUESTION, "--threads", "1"]
    asked = [*words, "--choice", "a", "--choice", "b", "--budget", "auto"]
    assert run([*asked, "--thresholds", str(tmp_path / "t.json"), "--json", str(tmp_path / "a.json")]) == 0
    assert f"tried {LADDER[0]}: confidence 0." in capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["budget"] == "none" and [step["budget"] for step in found["tried"]] == [LADDER[0], "none"]
    assert found["tried"][-1]["confidence"] == found["confidence"]
    for wrong, message in (
        (asked, "sinkprune-calibrate confidence"),
        ([*words, "--budget", "auto", "--thresholds", str(tmp_path / "t.json")], "closed list"),
        ([*words, "--thresholds", str(tmp_path / "t.json")], "--thresholds is for --budget auto"),
    ):
        assert run(wrong) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
