"""What the time of a deadline counts: the whole call, also where it compiles the form of an answer."""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline, write_costs
from sinkprune.deadlines import measuring
from sinkprune.deadlines.costs import Prediction
from sinkprune.deadlines.measuring import DecoderTimes
from sinkprune.deadlines.policy import DeadlinePolicy, RequestHistory
from sinkprune.runtime import loading
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.profiling.other_load import OtherLoad
from sinkprune.runtime.steps import pictures
from sinkprune.serving.choice_scores import logits_of_rows
from sinkprune.serving.forms import Grammars
from support.programs.commands import run

Bundles = Callable[..., Path]
QUESTION = "Is there a red circle?"


@pytest.fixture(autouse=True)
def nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are taken to be measured on a machine that does nothing else."""
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)


def test_the_call_counts_and_idle_time_before_the_first_piece_does_not(
    bundle: Bundles, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, constraint = Pipeline.load(bundle("gqa-112")), Grammars.constraint
    pipeline.warm_up(photo, QUESTION, seconds=0, regex="[0-9]{1,3}")

    def slow(*given: Any) -> Any:
        time.sleep(0.2)
        return constraint(*given)

    monkeypatch.setattr(Grammars, "constraint", slow)
    began = time.perf_counter()
    answer = pipeline.generate(photo, QUESTION, deadline_ms=60_000, max_new_tokens=1, regex="[0-9]{1,3}")
    whole = (time.perf_counter() - began) * 1e3
    assert answer.deadline is not None
    assert 200 < answer.deadline.measured_ms <= whole
    began = time.perf_counter()
    stream = pipeline.stream(photo, QUESTION, deadline_ms=60_000, max_new_tokens=1, regex="[0-9]{1,3}")
    time.sleep(1.0)
    deadline = stream.rest().deadline
    assert deadline is not None
    assert 200 < deadline.measured_ms <= (time.perf_counter() - began) * 1e3 - 1000


def test_a_warm_up_measures_for_later_deadlines_too(
    bundle: Bundles, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline.load(bundle("gqa-112"))
    # Whole requests are measured at the smallest budget alone.
    monkeypatch.setattr(measuring, "_FAR_TOO_SLOW", 0.0)
    costs = pipeline.warm_up(photo, QUESTION, seconds=0, deadline_ms=1000)
    unpruned = pipeline.generate(photo, QUESTION, max_new_tokens=1)
    assert costs.most_rows == unpruned.prompt_tokens + unpruned.visual_tokens


def test_a_history_takes_costs_of_passes_without_time() -> None:
    history = RequestHistory()
    history.add(Prediction(1.0, 1.0, (0.0,) * 9), 1.0, 5.0, 9)
    assert 0 < history.slower.token < math.inf


def test_the_command_counts_reading_the_picture_after_a_run_that_does_not_count(
    bundle: Bundles, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, picture, read = tmp_path / "costs.json", tmp_path / "photo.png", pictures.read_image
    write_costs(costs, Pipeline.load(bundle("gqa-112")).warm_up(photo, QUESTION, seconds=0))
    photo.save(picture)

    def slow(path: Path) -> Image.Image:
        time.sleep(0.2)
        return read(path)

    monkeypatch.setattr(pictures, "read_image", slow)
    asked = ("--image", picture, "--prompt", QUESTION, "--max-new-tokens", 1, "--deadline-ms", 60_000)
    answer = json.loads(run("sinkprune-run", bundle("gqa-112"), *asked, "--costs", costs, "--json").stdout)
    assert answer["deadline"]["measured_ms"] > answer["ms"]["latency"] + 200


def test_pictures_are_freed_before_the_budget_is_chosen(
    bundle: Bundles, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture of 12 megapixels takes milliseconds to free, which would count as slowness of the machine."""
    pipeline, decoded, choose = Pipeline.load(bundle("gqa-112")), loading.pixels_of, DeadlinePolicy.choose
    pipeline.warm_up(photo, QUESTION, seconds=0)
    seen, alive = list[Any](), list[Any]()

    def noted(*given: Any) -> Any:
        picture = decoded(*given)
        seen.append(weakref.ref(picture))
        return picture

    def choose_noted(*given: Any) -> Any:
        alive.append(seen[0]())
        return choose(*given)

    monkeypatch.setattr(loading, "pixels_of", noted)
    monkeypatch.setattr(DeadlinePolicy, "choose", choose_noted)
    pipeline.generate(photo.copy(), QUESTION, deadline_ms=60_000, max_new_tokens=1)
    assert alive == [None]


@pytest.mark.parametrize("form", [{"max_new_tokens": 2}, {"choice": ("a red circle", "none")}])
def test_freeing_the_caches_counts(
    form: dict[str, Any], bundle: Bundles, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free a cache of openvino, a thread waits until no other runs the model."""
    pipeline = Pipeline.load(bundle("gqa-112"))
    pipeline.warm_up(photo, QUESTION, seconds=0)
    monkeypatch.setattr(
        Observer, "prefilled", lambda self, prefilled: weakref.finalize(prefilled.cache, time.sleep, 0.3)
    )
    began = time.perf_counter()
    deadline = pipeline.generate(photo, QUESTION, deadline_ms=60_000, **form).deadline
    after_ms = (time.perf_counter() - began) * 1e3
    assert deadline is not None and deadline.measured_ms > 300
    assert after_ms - deadline.measured_ms < 200


def test_the_first_tokens_after_a_prefill_do_not_stand_for_all(
    bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, decode, calls = Pipeline.load(bundle("gqa-112")), measuring.decode_one_token, list[int]()

    def slow_at_first(*given: Any) -> Any:
        calls.append(0)
        time.sleep(0.15 if len(calls) == 1 else 0.05)
        return decode(*given)

    def slow_rows(chain: Any, cache: Any, rows: Any) -> Iterator[Any]:
        for row in logits_of_rows(chain, cache, rows):
            time.sleep(0.05)
            yield row

    monkeypatch.setattr(measuring, "decode_one_token", slow_at_first)
    monkeypatch.setattr(measuring, "logits_of_rows", slow_rows)
    times = DecoderTimes(pipeline.chain, pipeline.embedding, [20])
    times.run(counted=True)
    assert 50 < times.token.ms(20) < 70
    first, *others = times.token_start
    assert 2 < first < 3.1
    assert others == pytest.approx([1, 1, 1], abs=0.3)
    assert 45 < times.pass_row < 70


def test_a_closed_list_is_expected_by_the_length_of_its_texts(bundle: Bundles, photo: Image.Image) -> None:
    pipeline, expected = Pipeline.load(bundle("gqa-112")), list[float]()
    costs = pipeline.warm_up(photo, QUESTION, seconds=0)
    for pass_row in (0.0, 1000.0):
        pipeline.costs = replace(costs, pass_row=pass_row)
        lists = {"choice": ("a red circle on a blue table", "none"), "deadline_ms": 60_000}
        deadline = pipeline.generate(photo, QUESTION, **lists).deadline
        assert deadline is not None
        expected.append(deadline.predicted_ms)
    assert expected[1] > expected[0] + 2000
