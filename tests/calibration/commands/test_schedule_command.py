"""`sinkprune-calibrate schedule` from end to end: budgets are found, tried, reported and added, or refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.commands import schedule as schedule_command
from sinkprune.calibration.evaluation.replies import Combination
from sinkprune.calibration.scheduling.propose import Proposer
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import from_json
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.report import Spread
from sinkprune.deadlines.costs import COSTS_VERSION, Costs, Curve, predict
from support.models.tasks import write_task
from support.programs.commands import assert_refused, schedule, wrote
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("no_note_of_load")


@pytest.mark.usefixtures("any_prediction")
def test_a_budget_of_a_mean_is_added(
    own: Path, tmp_path: Path, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, costs = tmp_path / "report.json", tmp_path / "costs.json"
    outcome = schedule(own, "--budget-tokens", 16, "--json", report, "--costs", costs)
    assert (outcome.code, outcome.stderr) == (0, wrote(costs, report))
    found, told = read_bundle(own), json.loads(report.read_text())
    found.verify()
    assert (told["sha256"], told["notes"]) == (found.sha256, [schedule_command._DRAWN])
    assert f"sha256 {found.sha256}" in outcome.stdout and "mean-16: predicted" in outcome.stdout
    assert re.search(r"; the prediction is \d+\.\d % too (low|high)\n", outcome.stdout)
    assert re.search(r"The sha256 is new: replace it where you give --sha256 .* engines", outcome.stdout)
    answer = Pipeline.load(own).generate(photo, "What?", budget="mean-16", max_new_tokens=1)
    mean = sum(answer.tokens_per_layer) / len(answer.tokens_per_layer)
    assert 13 < mean <= 16
    assert told["chosen"]["mean_visual_tokens"] == pytest.approx(mean)
    assert told["chosen"]["rows"][0] == answer.tokens_per_layer[0]
    assert told["chosen"]["rows"][-1] == answer.tokens_per_layer[-1]
    assert 0 < told["chosen"]["lost"] < 1 and told["chosen"]["predicted_ms"] > 0
    assert from_json(Costs, json.loads(costs.read_text())) == from_json(Costs, told["costs"])
    again = schedule(own, "--budget-tokens", 16, "--json", report)
    assert_refused(again, "holds a budget 'mean-16' already", "--force")
    with monkeypatch.context() as patch:
        patch.setattr("sinkprune.calibration.scheduling.report._MOST_LOST", 0.0)
        worse = schedule(own, "--budget-tokens", 12, "--name", "mean-16", "--force")
    assert worse.code == 0
    assert re.search(r"warning: the budget drops \d+\.\d % of the text's attention", worse.stderr)


def test_answers_choose_where_there_are_any(own: Path, tmp_path: Path) -> None:
    data = write_task(tmp_path, [("a.png", f"What is {number}?") for number in range(3)])
    report = tmp_path / "report.json"
    outcome = schedule(own, "--budget-tokens", 10, "--data", data, "--limit", 2, "--json", report)
    assert outcome.code == 0, outcome.stderr
    told = json.loads(report.read_text())
    assert told["unpruned_accuracy"] == 0.0 and told["chosen"]["accuracy"] == 0.0
    assert len(told["others"]) == 3 and "also looked at" in outcome.stdout
    assert told["questions"] == 2 and outcome.stdout.count("0 of 2 answers right") == 5
    assert "warning: Small sample: 2 questions." in outcome.stderr
    assert "warning: Small sample: 1 picture." in outcome.stderr
    assert told["chosen"]["lost"] == min(each["lost"] for each in [told["chosen"], *told["others"]])


def test_costs_alone_are_measured(own: Path, tmp_path: Path) -> None:
    before, costs = read_bundle(own).sha256, tmp_path / "costs.json"
    outcome = schedule(own, "--costs", costs)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", wrote(costs))
    assert len(from_json(Costs, json.loads(costs.read_text())).decoders) == 4
    assert read_bundle(own).sha256 == before
    report = tmp_path / "report.json"
    told = schedule(own, "--costs", costs, "--json", "-")
    assert schedule(own, "--costs", costs, "--json", report).stdout == ""
    for written in (json.loads(told.stdout), json.loads(report.read_text())):
        assert len(from_json(Costs, written["costs"]).decoders) == 4
    assert json.loads(report.read_text())["costs"] == json.loads(costs.read_text())


def test_a_fit_is_that_of_the_measured_pictures(own: Path, tmp_path: Path, photo: Image.Image) -> None:
    photo.resize((200, 100)).save(tmp_path / "wide.png")
    words = ("--costs", tmp_path / "costs.json", "--image", tmp_path / "wide.png", "--json", tmp_path / "r.json")
    for fit, share in (((), 0.5), (("--fit", "pad"), 1.0)):
        outcome = schedule(own, *words, *fit)
        assert outcome.code == 0, outcome.stderr
        assert json.loads((tmp_path / "r.json").read_text())["seen_share"] == share
        note = f"{tmp_path}/wide.png: the model sees 50 % of the picture (the middle 100x100 of 200x100). --fit pad"
        assert outcome.stderr.startswith(note) if not fit else "the model sees" not in outcome.stderr


def test_what_cannot_be_is_refused(own: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("")
    for arguments, said in [
        ((), ("neither a budget nor costs were requested", "--target-ms")),
        (("--json", tmp_path / "r.json"), ("neither a budget nor costs were requested",)),
        *(
            (("--costs", tmp_path / "c.json", *option), (f"{option[0]} is about a budget", "--target-ms"))
            for option in (("--name", "x"), ("--force",), ("--dry-run",), ("--sign", data))
        ),
        (("--budget-tokens", 10, "--dry-run", "--sign", data), ("--sign signs the changed bundle",)),
        (("--budget-tokens", 10, "--max-new-tokens", 0), ("--new-tokens is 0",)),
        (("--budget-tokens", 10, "--data", "scenes"), ("the test set",)),
        (("--budget-tokens", 10, "--data", data, "--prompt", "What?"), ("--data", "--prompt")),
        (("--budget-tokens", 10, "--data", data), ("is empty",)),
        (("--budget-tokens", 10, "--limit", 2), ("--limit counts the questions of --data. Add --data, or leave it",)),
        (("--budget-tokens", 10, "--image", tmp_path / "no.png"), ("no such file",)),
        (("--budget-tokens", 10, "--costs", own / "costs.json"), ("which is read",)),
        (("--budget-tokens", 10, "--name", "retain-64"), ("Choose another --name",)),
        (("--budget-tokens", 10, "--name", "../x", "--dry-run"), ("'../x' cannot be a budget's",)),
        (("--budget-tokens", 64), ("no pruning is needed", "--budget none")),
        (("--budget-tokens", 1), ("no budget takes as little as 1", "the least is", "may meet is --budget-tokens ")),
        (("--target-ms", 0.5), ("--target-ms is 0.5, expected milliseconds, from 1 to 86400000",)),
        (("--target-ms", 1), ("no budget takes as little", "the least is")),
        (("--target-ms", 60_000), ("no pruning is needed", "or give a smaller target. 3 requests of each: of fewer")),
    ]:
        assert_refused(schedule(own, *arguments), *said)
    assert [*read_bundle(own).manifest.budgets] == ["retain-192", "retain-128", "retain-64", "retain-32"]


@pytest.mark.parametrize("name", [slow("qwen"), slow("next")])
def test_other_families(name: str, bundle: Bundles, tmp_path: Path, photo: Image.Image) -> None:
    own = Path(shutil.copytree(bundle(name), tmp_path / "bundle"))
    pictures = tmp_path / "a.png"
    photo.save(pictures)
    unpruned = Pipeline.load(own).generate(photo, "What?", max_new_tokens=1).tokens_per_layer[0]
    outcome = schedule(own, "--budget-tokens", unpruned // 4, "--image", pictures, "--name", "quarter")
    assert outcome.code == 0, outcome.stderr
    answer = Pipeline.load(own).generate(photo, "What?", budget="quarter", max_new_tokens=1)
    mean = sum(answer.tokens_per_layer) / len(answer.tokens_per_layer)
    assert 0.5 * unpruned / 4 < mean <= unpruned / 4


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["_attention", "propose"])
def test_an_interrupt_keeps_the_costs(place: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposer, place, interrupted)
    costs, report = tmp_path / "costs.json", tmp_path / "x.json"
    words = (own, "--target-ms", 60_000, "--costs", costs, "--json", report)
    outcome = schedule(*words)
    assert outcome.code == 130
    assert outcome.stderr.endswith("interrupted; no budget was added; the costs were measured.\n")
    found = json.loads(report.read_text())
    assert found == {
        "costs": json.loads(costs.read_text()),
        "interrupted": "no budget was added; the costs were measured.",
        "notes": [schedule_command._DRAWN],
        "seen_share": 1.0,
    }
    assert len(found["costs"]["decoders"]) == 4
    costs.write_text("costly")
    report.write_text("precious")
    outcome = schedule(*words)
    moved = [tmp_path / "x.interrupted.json", tmp_path / "costs.interrupted.json"]
    assert outcome.stderr.endswith(
        f"were measured. Earlier files stay; these results are in '{moved[0]}', '{moved[1]}'.\n"
    )
    assert (costs.read_text(), report.read_text()) == ("costly", "precious")
    assert json.loads(moved[0].read_text())["costs"] == json.loads(moved[1].read_text())


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have requests take a millisecond a row and segment, and the slowest of them a number of times as long."""

    def measure_costs(pipeline: Pipeline, *given: object) -> Costs:
        nothing, row = Curve(0.0, 0.0, 0.0), Curve(0.0, 1.0, 0.0)
        segments = (row,) * len(pipeline.bundle.manifest.segments)
        return Costs(
            COSTS_VERSION,
            nothing,
            nothing,
            nothing,
            segments,
            nothing,
            1.0,
            row,
            (),
            0.0,
            10**6,
            place=pipeline.place,
        )

    def set_tail(tail: float) -> None:
        def measure(times: Proposer, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
            # As costs predict, and so many times as long in one of 20 requests
            times.requests = 20
            predicted = [times.predict(each, new_tokens) for each in combinations]
            return [Spread(ms, tail * ms) for ms in predicted]

        monkeypatch.setattr(Pipeline, "measure_costs", measure_costs)
        monkeypatch.setattr(Proposer, "measure", measure)

    return set_tail


@pytest.mark.parametrize("tail", [slow(1.0), 1.25])
def test_a_time_is_met_by_95_of_100_requests(
    tail: float, own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(tail)
    refused = schedule(own, "--target-ms", 1, "--json", tmp_path / "r.json")
    assert refused.code == 2
    told = json.loads((tmp_path / "r.json").read_text())
    assert refused.stderr == f"wrote {tmp_path}/r.json\nerror: {told['error']}\n"
    keys = {"costs", "error", "requests", "nearest_target_ms", "nearest_budget_tokens"}
    assert set(told) == {*keys, "notes", "seen_share"}
    assert f"may meet is --target-ms {told['nearest_target_ms']}. " in told["error"]
    assert told["nearest_budget_tokens"] is None
    target, report = 250, tmp_path / "report.json"
    outcome = schedule(own, "--target-ms", target, "--json", report)
    assert (outcome.code, outcome.stderr) == (0, wrote(report))
    assert f"in-{target}ms" in read_bundle(own).manifest.budgets
    assert (
        f"Run the budget: sinkprune-run {own} --budget in-{target}ms, with --image and --prompt\n" in outcome.stdout
    )
    predicted = json.loads(report.read_text())["chosen"]["predicted_ms"]
    # Most of the time is used.
    assert 0.8 * target < tail * predicted <= target


def test_a_budget_that_was_in_time_is_kept_where_the_next_is_not(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that it leaves is tried by a larger one, and then by one between the two."""
    simulated(1.0)
    spreads = iter([Spread(60.0, 66.0), Spread(200.0, 250.0), Spread(120.0, 138.0)])

    def measure(times: Proposer, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        times.requests = 20
        return [next(spreads), Spread(400.0, 400.0)]

    monkeypatch.setattr(Proposer, "measure", measure)
    outcome = schedule(own, "--target-ms", 150)
    assert outcome.code == 0
    assert "measured 120 ms (p95 138 ms)" in outcome.stdout and "searched 3 times" in outcome.stdout
    assert next(spreads, None) is None


@pytest.mark.parametrize("disturbed", [{1}, {1, 2}])
def test_disturbed_measurements_do_not_choose_a_tiny_budget(
    disturbed: set[int],
    own: Path,
    simulated: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One request of 20 took six times as long: by that tail, only the cheapest budgets are in time."""
    simulated(1.05)
    steady, calls, report = Proposer.measure, count(1), tmp_path / "report.json"

    def measure(times: Proposer, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        found = steady(times, combinations, new_tokens)
        return [Spread(each.median, 6.0 * each.median) for each in found] if next(calls) in disturbed else found

    monkeypatch.setattr(Proposer, "measure", measure)
    assert schedule(own, "--target-ms", 250, "--dry-run", "--json", report).code == 0
    told = json.loads(report.read_text())
    assert 0.8 * 250 < told["measured_ms"]["p95"] <= 250 and told["searches"] <= 6


Measure = Callable[[Proposer, Sequence[Combination], int], list[Spread]]


def slower_machine(times_as_slow: float, late_ms: float) -> Measure:
    """Return measurements of a machine that is slower than its costs, and later still in one of 20 requests."""

    def measure(times: Proposer, combinations: Sequence[Combination], new_tokens: int) -> list[Spread]:
        pipeline, times.requests = times._pipeline, 20
        # `simulated` costs have no tower.
        costs, manifest = pipeline.measure_costs(None, 0.0).slower(times_as_slow), pipeline.bundle.manifest  # type: ignore[arg-type]
        each = [predict(costs, manifest, times.schedule(one), times.text_tokens) for one in combinations]
        predicted = [one.first + one.later(new_tokens - 1) for one in each]
        return [Spread(ms, ms + late_ms) for ms in predicted]

    return measure


@pytest.mark.parametrize("asked", [1, 150])
def test_the_nearest_target_is_met(
    asked: float, own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay that all budgets have makes the tail of small budgets longer than that of the unpruned model."""
    simulated(1.0)
    monkeypatch.setattr(Proposer, "measure", slower_machine(1.0, 200.0))
    refused = schedule(own, "--target-ms", asked)
    assert refused.code == 2
    nearest = re.search(r"--target-ms (\d+)", refused.stderr)
    assert nearest is not None
    assert schedule(own, "--target-ms", nearest[1]).code == 0


def test_the_cheapest_budget_is_tried_before_a_target_is_rejected(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Costs that were measured under load predict that no budget is in time."""
    simulated(1.0)
    monkeypatch.setattr(Proposer, "measure", slower_machine(0.5, 0.0))
    report = tmp_path / "report.json"
    refused = schedule(own, "--target-ms", 1)
    (least,) = re.findall(r"the least is ([0-9.]+)", refused.stderr)
    outcome = schedule(own, "--target-ms", 1.5 * float(least), "--json", report)
    assert (outcome.code, outcome.stderr) == (0, wrote(report))
    told = json.loads(report.read_text())
    assert told["searches"] > 1 and "searched 2 times" in outcome.stdout
    # Most of the time is used: the search went on from there.
    assert 1.3 * float(least) < told["measured_ms"]["p95"] <= 1.5 * float(least)


def test_no_budget_is_added_where_the_unpruned_model_meets_the_target_after_all(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(1.0)
    # While the costs were measured, the machine was four times as slow.
    monkeypatch.setattr(Proposer, "measure", slower_machine(0.25, 0.0))
    outcome = schedule(own, "--target-ms", 250)
    assert_refused(outcome, "no budget was added, because no pruning is needed")
    assert "in-250ms" not in read_bundle(own).manifest.budgets


def test_another_error_keeps_the_costs_too(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposer, "_attention", Mock(side_effect=NumericsError("not finite")))
    outcome = schedule(own, "--budget-tokens", 16, "--costs", tmp_path / "costs.json")
    assert (outcome.code, outcome.stderr.splitlines()[-1]) == (2, "error: not finite")
    assert len(from_json(Costs, json.loads((tmp_path / "costs.json").read_text())).decoders) == 4
