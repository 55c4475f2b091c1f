"""`sinkprune-calibrate schedule` from end to end: budgets are found, tried, reported and added, or refused."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.commands import schedule as schedule_command
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.scheduling.propose import Proposer
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks.fields import from_json
from sinkprune.contract.costs.model import COSTS_VERSION, Costs, Curve
from sinkprune.contract.reports.report import Spread
from sinkprune.contract.schedule import schedule as schedule_of
from sinkprune.runtime.backends.known import KNOWN
from support.models.tasks import write_task
from support.programs.commands import Outcome, assert_refused, own_process, run
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]


@pytest.fixture
def own(bundle: Bundles, tmp_path: Path) -> Path:
    """A bundle that may be written to."""
    return Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))


def schedule(*arguments: object) -> Outcome:
    return run("sinkprune-calibrate", "schedule", *arguments, "--seconds", 0)


@pytest.fixture(autouse=True)
def no_note_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs the tests."""
    monkeypatch.setattr(schedule_command, "LOADED", 1.0)


def test_a_busy_machine_is_noted(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_command, "LOADED", -1.0)
    outcome = schedule(own, "--budget-tokens", 16, "--dry-run")
    assert outcome.code == 0
    assert re.fullmatch(
        r"note: other programs took \d+ % of the processors meanwhile\. Measure again .*\n", outcome.stderr
    )


def test_a_budget_of_a_mean_is_added(own: Path, tmp_path: Path, photo: Image.Image) -> None:
    report, costs = tmp_path / "report.json", tmp_path / "costs.json"
    outcome = schedule(own, "--budget-tokens", 16, "--json", report, "--costs", costs)
    assert (outcome.code, outcome.stderr) == (0, "")
    found, told = read_bundle(own), json.loads(report.read_text())
    found.verify()
    assert told["sha256"] == found.sha256
    assert f"sha256 {found.sha256}" in outcome.stdout and "mean-16: predicted" in outcome.stdout
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
    assert schedule(own, "--budget-tokens", 12, "--name", "mean-16", "--force").code == 0


def test_a_time_is_met(own: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    asked = (own, "--image", tmp_path / "a.png", "--prompt", "What is this?", "--json", report)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.png")
    outcome = schedule(*asked, "--budget-tokens", 40, "--dry-run", "--json", "-")
    assert outcome.code == 0, outcome.stderr
    printed = json.loads(outcome.stdout)
    none = printed["unpruned_ms"]
    assert printed["sha256"] is None and not report.exists()
    sum_before = read_bundle(own).sha256
    outcome = schedule(*asked, "--target-ms", 0.85 * none, "--name", "quick", "--dry-run")
    assert read_bundle(own).sha256 == sum_before
    if outcome.code == 0:
        told = json.loads(report.read_text())
        assert told["chosen"]["predicted_ms"] <= 0.85 * none
        assert told["measured_ms"]["median"] > 0
        assert told["name"] == "quick" and told["chosen"]["accuracy"] is None
    else:
        # The machine's speed was another by then.
        assert "no budget takes as little" in outcome.stderr or "no pruning is needed" in outcome.stderr


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Have requests take a millisecond a row and segment, and the slowest of them a number of times as long."""

    def measure_costs(pipeline: Pipeline, *given: object) -> Costs:
        nothing, row = Curve(0.0, 0.0, 0.0), Curve(0.0, 1.0, 0.0)
        segments = (row,) * len(pipeline.bundle.manifest.segments)
        return Costs(COSTS_VERSION, pipeline.place, nothing, nothing, nothing, segments, nothing, 1.0, row)

    def set_tail(tail: float) -> None:
        def measure(proposer: Proposer, turns: Sequence[Combination], new_tokens: int) -> list[Spread]:
            # As costs predict, and so many times as long in one of 20 requests
            plans = [schedule_of(proposer._manifest, *each, [proposer._layout]) for each in turns]
            predicted = [proposer._predict(plan).latency(new_tokens) for plan in plans]
            return [Spread(ms, tail * ms) for ms in predicted]

        monkeypatch.setattr(Pipeline, "measure_costs", measure_costs)
        monkeypatch.setattr(Proposer, "_measure", measure)

    return set_tail


@pytest.mark.parametrize("tail", [slow(1.0), 1.25])
def test_a_time_is_met_by_95_of_100_requests(
    tail: float, own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(tail)
    assert schedule(own, "--target-ms", 1, "--json", tmp_path / "r.json").code == 2
    target, report = 250, tmp_path / "report.json"
    outcome = schedule(own, "--target-ms", target, "--json", report)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert f"in-{target}ms" in read_bundle(own).manifest.budgets
    predicted = json.loads(report.read_text())["chosen"]["predicted_ms"]
    # Most of the time is used.
    assert 0.8 * target < tail * predicted <= target


def test_an_unpruned_model_that_is_in_time_most_of_the_time_is_pruned(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(1.0)
    refused = schedule(own, "--target-ms", 60_000)
    assert_refused(refused, "no pruning is needed", "in 95 of 100 requests")
    (unpruned,) = re.findall(r"takes up to (\d+) ms", refused.stderr)
    report, target = tmp_path / "report.json", 1.1 * float(unpruned)
    simulated(1.25)
    outcome = schedule(own, "--target-ms", target, "--name", "quick", "--json", report)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert 0.8 * target < json.loads(report.read_text())["measured_ms"]["p95"] <= target


def test_a_budget_that_was_in_time_is_kept_where_the_next_is_not(
    own: Path, simulated: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated(1.0)
    spreads = iter([Spread(100.0, 110.0), Spread(400.0, 500.0)])

    def measure(proposer: Proposer, turns: Sequence[Combination], new_tokens: int) -> list[Spread]:
        return [next(spreads), Spread(400.0, 400.0)]

    monkeypatch.setattr(Proposer, "_measure", measure)
    outcome = schedule(own, "--target-ms", 250)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "measured 100 ms (p95 110 ms)" in outcome.stdout
    assert next(spreads, None) is None


def test_a_name_that_would_promise_too_much_is_not_given(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(50.0)
    report, costs = tmp_path / "report.json", tmp_path / "costs.json"
    outcome = schedule(own, "--target-ms", 250, "--json", report, "--costs", costs)
    assert outcome.code == 2
    p95 = json.loads(report.read_text())["measured_ms"]["p95"]
    assert f"'in-250ms' was found and not added: 95 of 100 requests took up to {p95:.0f} ms" in outcome.stderr
    assert f"--target-ms {math.ceil(1.1 * p95)}" in outcome.stderr
    assert "in-250ms" not in read_bundle(own).manifest.budgets
    assert from_json(Costs, json.loads(costs.read_text())) == from_json(
        Costs, json.loads(report.read_text())["costs"]
    )
    named = schedule(own, "--target-ms", 250, "--name", "quick")
    assert named.code == 0 and named.stderr.startswith("warning: 95 of 100 requests took up to")
    assert "quick" in read_bundle(own).manifest.budgets


def test_costs_are_written_where_no_budget_is_found(
    own: Path, simulated: Callable[[float], None], tmp_path: Path
) -> None:
    simulated(1.0)
    costs = tmp_path / "costs.json"
    outcome = schedule(own, "--target-ms", 1, "--costs", costs)
    assert outcome.code == 2
    least = re.search(r"the least is ([0-9.]+), .* may meet is --target-ms (\d+)\.", outcome.stderr)
    assert least is not None and float(least[1]) < float(least[2]) < 1.2 * float(least[1]) + 1
    assert from_json(Costs, json.loads(costs.read_text())).rest == 1.0
    assert schedule(own, "--target-ms", least[2]).code == 0


def test_answers_choose_where_there_are_any(own: Path, tmp_path: Path) -> None:
    data = write_task(tmp_path, [("a.png", f"What is {number}?") for number in range(3)])
    report = tmp_path / "report.json"
    outcome = schedule(own, "--budget-tokens", 10, "--data", data, "--limit", 2, "--json", report)
    assert outcome.code == 0, outcome.stderr
    told = json.loads(report.read_text())
    assert told["unpruned_accuracy"] == 0.0 and told["chosen"]["accuracy"] == 0.0
    assert len(told["others"]) == 3 and "also looked at" in outcome.stdout
    assert told["chosen"]["lost"] == min(each["lost"] for each in [told["chosen"], *told["others"]])


@pytest.mark.parametrize(("worth", "told"), [slow((-1.0, True)), (1.0, False)])
def test_other_cuts_are_printed_if_they_save_enough(
    worth: float, told: bool, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_command, "_WORTH_A_CUT", worth)
    outcome = schedule(own, "--budget-tokens", 16, "--dry-run", "--json", tmp_path / "report.json")
    (other,) = json.loads((tmp_path / "report.json").read_text())["other_cuts"]
    assert ("sinkprune-export --methods sinkpruner,pyramiddrop" in outcome.stdout) == told
    assert set(read_bundle(own).manifest.cut_after) < set(other["cut_after"])


def test_costs_alone_are_measured(own: Path, tmp_path: Path) -> None:
    before, costs = read_bundle(own).sha256, tmp_path / "costs.json"
    outcome = schedule(own, "--costs", costs)
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")
    assert len(from_json(Costs, json.loads(costs.read_text())).decoders) == 4
    assert read_bundle(own).sha256 == before


def test_what_cannot_be_is_refused(own: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("")
    for arguments, said in [
        ((), ("neither a budget nor costs were requested", "--target-ms")),
        (("--json", tmp_path / "r.json", "--costs", tmp_path / "c.json"), ("--json reports a budget",)),
        (("--budget-tokens", 10, "--data", "scenes"), ("the test set",)),
        (("--budget-tokens", 10, "--data", data, "--prompt", "What?"), ("--data", "--prompt")),
        (("--budget-tokens", 10, "--data", data), ("is empty",)),
        (("--budget-tokens", 10, "--image", tmp_path / "no.png"), ("no such file",)),
        (("--budget-tokens", 10, "--costs", own / "costs.json"), ("which is read",)),
        (("--budget-tokens", 10, "--name", "retain-64"), ("Choose another --name",)),
        (("--budget-tokens", 10, "--name", "../x", "--dry-run"), ("'../x' cannot be a budget's",)),
        (("--budget-tokens", 64), ("no pruning is needed", "--budget none")),
        (("--budget-tokens", 1), ("no budget takes as little as 1", "the least is", "may meet is --budget-tokens ")),
        (("--target-ms", 0.001), ("no budget takes as little", "the least is")),
        (("--target-ms", 60_000), ("no pruning is needed",)),
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


def test_backends_that_run_built_engines_only_are_refused() -> None:
    words = ("schedule", "bundle", "--target-ms", 9, "--backend", "openvino-gpu")
    done = subprocess.run(own_process("sinkprune-calibrate", *words), capture_output=True, text=True)
    choices = set(re.findall(r"'([^']+)'", done.stderr))
    assert done.returncode == 2
    assert choices - {"openvino-gpu"} == {name for name, spec in KNOWN.items() if spec.runs_new_budgets}
    assert {"ort-cpu", "openvino"} <= choices
