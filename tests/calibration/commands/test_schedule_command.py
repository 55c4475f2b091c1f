"""`sinkprune-calibrate schedule` from end to end: budgets are found, tried, reported and added, or refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.commands import schedule as schedule_command
from sinkprune.calibration.scheduling import report as report_text
from sinkprune.calibration.scheduling.propose import Proposer
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import from_json
from sinkprune.deadlines import costs as costs_model
from sinkprune.deadlines.costs import Costs
from sinkprune.deadlines.policy import OtherLoad
from sinkprune.runtime.backends.known import KNOWN
from support.models.tasks import write_task
from support.programs.commands import assert_refused, own_process, run, wrote
from support.programs.schedule_runs import schedule
from support.programs.slow_cases import slow

DRAWN = f"note: {schedule_command._DRAWN}\n"
Bundles = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("no_note_of_load")


@pytest.mark.usefixtures("any_prediction")
@pytest.mark.parametrize(("threads", "hint"), [(1, ""), (2, r" If other .* compare --threads 1: .*")])
def test_a_busy_machine_is_noted(threads: int, hint: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs_model, "LOADED", -1.0)
    outcome = schedule(own, "--budget-tokens", 16, "--dry-run", "--threads", threads)
    assert outcome.code == 0
    load = r"were measured while other programs took \d+ % of the processors"
    assert re.fullmatch(
        rf"note: the costs {load}\. Measure them again when the machine is idle\.{hint}\n", outcome.stderr
    )


def test_what_became_of_the_costs_is_noted(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether a budget is added or not.
    ways = (("--budget-tokens", 16, "--dry-run"), ("--target-ms", 60_000))
    words = ("sinkprune-calibrate", "schedule", own, "--seconds", 0)
    for code, way in zip((0, 2), ways, strict=True):
        # Also where no budget is found.
        drawn, refused = run(*words, *way).stderr.split("\n", 1)
        assert f"{drawn}\n" == DRAWN
        assert re.match(r"warning: the costs could not be written to '/dev/null/.*, so later runs do not", refused)
        with monkeypatch.context() as context:
            context.setenv("XDG_CACHE_HOME", str(tmp_path))
            outcome = run(*words, *way)
            kept = re.search(rf"note: the costs are kept in '({tmp_path}/.*\.json)'\.\n", outcome.stderr)
            assert outcome.code == code and kept and Path(kept[1]).exists()
            # Costs of an idle machine are replaced by those of a busy one.
            found = json.loads(Path(kept[1]).read_text())
            Path(kept[1]).write_text(json.dumps({**found, "load": 0.0}))
            context.setattr(OtherLoad, "share", lambda self: 0.6)
            context.setattr(costs_model, "LOADED", 0.25)
            said = (
                "note: the costs were measured while other programs took 60 % of the processors, and replace costs "
            )
            assert run(*words, *way).stderr.startswith(
                f"{DRAWN}{said}measured at 0 %. Measure them again when the machine"
            )


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
    told = json.loads(report.read_text())
    if "chosen" in told:
        # By the measurement, whatever the machine's costs were when the budget was predicted.
        met = told["measured_ms"]["p95"] <= 0.85 * none
        assert (outcome.code == 0, told["nearest_target_ms"] is None) == (met, met), outcome.stderr
        assert met or f", or give --target-ms {told['nearest_target_ms']}. " in outcome.stderr
        assert told["measured_ms"]["median"] > 0
        assert told["name"] == "quick" and told["chosen"]["accuracy"] is None
    else:
        # The machine's speed was another by then.
        assert outcome.code == 2 and outcome.stderr.endswith(f"error: {told['error']}\n")
        assert "no budget takes as little" in outcome.stderr or "no pruning is needed" in outcome.stderr


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


@pytest.mark.parametrize(("worth", "told"), [slow((-1.0, True)), (1.0, False)])
def test_other_cuts_are_printed_if_they_save_enough(
    worth: float, told: bool, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_text, "_WORTH_A_CUT", worth)
    outcome = schedule(own, "--budget-tokens", 16, "--dry-run", "--json", tmp_path / "report.json")
    (other,) = json.loads((tmp_path / "report.json").read_text())["other_cuts"]
    assert ("sinkprune-export --methods sinkpruner,pyramiddrop" in outcome.stdout) == told
    assert set(read_bundle(own).manifest.cut_after) < set(other["cut_after"])


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


def test_a_fit_is_that_of_the_measured_pictures(
    own: Path, tmp_path: Path, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo.resize((200, 100)).save(tmp_path / "wide.png")
    fits, load = list[str | None](), schedule_command.load_pipeline

    def noted(*arguments: Any) -> Pipeline:
        pipeline = load(*arguments)
        fits.append("pad" if pipeline.family.layout(photo.resize((200, 100))).seen_share == 1 else None)
        return pipeline

    monkeypatch.setattr(schedule_command, "load_pipeline", noted)
    for fit in ((), ("--fit", "pad")):
        outcome = schedule(own, "--costs", tmp_path / "costs.json", "--image", tmp_path / "wide.png", *fit)
        assert outcome.code == 0, outcome.stderr
        note = f"{tmp_path}/wide.png: the model sees 50 % of the picture (the middle 100x100 of 200x100). --fit pad"
        assert outcome.stderr.startswith(note) if not fit else "the model sees" not in outcome.stderr
    assert fits == [None, "pad"]


def test_notes_name_each_size_of_own_pictures_and_one_of_many_questions(
    own: Path, tmp_path: Path, photo: Image.Image
) -> None:
    sizes = {"wide.png": (200, 100), "also-wide.png": (200, 100), "tall.png": (90, 120), "square.png": (80, 80)}
    for name, size in sizes.items():
        photo.resize(size).save(tmp_path / name)
    images = [word for name in sizes for word in ("--image", tmp_path / name)]
    report = tmp_path / "r.json"
    outcome = schedule(own, "--costs", tmp_path / "costs.json", *images, "--json", report)
    noted = re.findall(r"(\S+): the model sees (\d+) %", outcome.stderr)
    assert sorted(noted) == [(f"{tmp_path}/tall.png", "75"), (f"{tmp_path}/wide.png", "50")]
    assert outcome.stderr.count("\n") == 4 and wrote(tmp_path / "costs.json") in outcome.stderr
    told = json.loads(report.read_text())
    assert (set(told), told["seen_share"]) == ({"costs", "notes", "seen_share"}, 0.5) and len(told["notes"]) == 2
    data = write_task(tmp_path, [(name, "What is this?") for name in ("first.png", "second.png")])
    for name in ("first.png", "second.png"):
        photo.resize((200, 100)).save(tmp_path / name)
    outcome = schedule(own, "--budget-tokens", 16, "--dry-run", "--data", data, "--json", report)
    assert outcome.code == 0, outcome.stderr
    warnings = json.loads(report.read_text())["warnings"]
    assert warnings and outcome.stderr.endswith("".join(f"warning: {warning}\n" for warning in warnings))
    assert outcome.stderr.startswith(f"{tmp_path}/first.png: the model sees 50 % of the picture (")
    assert outcome.stderr.count("the model sees") == 1
    assert "warning: The model sees only a part of the picture in 2 of 2 requests (50 % at least)" in outcome.stderr


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


def test_backends_that_run_built_engines_only_are_refused() -> None:
    words = ("schedule", "bundle", "--target-ms", 9, "--backend", "openvino-gpu")
    done = subprocess.run(own_process("sinkprune-calibrate", *words), capture_output=True, text=True)
    choices = set(re.findall(r"'([^']+)'", done.stderr))
    assert done.returncode == 2
    assert choices - {"openvino-gpu"} == {name for name, spec in KNOWN.items() if spec.runs_new_budgets}
    assert {"ort-cpu", "openvino"} <= choices


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


@pytest.mark.parametrize("wanted", [(), ("--budget-tokens", 16)])
def test_an_interrupt_before_there_are_costs_writes_nothing(
    wanted: tuple[object, ...], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "measure_costs", interrupted)
    outcome = schedule(own, *wanted, "--costs", tmp_path / "costs.json", "--json", tmp_path / "x.json")
    assert (outcome.code, outcome.stderr) == (
        130,
        "interrupted; no costs were kept: they need all rounds of the measurement.\n",
    )
    assert not [*tmp_path.glob("*.json")]


def test_costs_are_written_once(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = list[Costs](), schedule_command.write_costs

    def noted(path: Path, costs: Costs) -> None:
        written.append(costs)
        write(path, costs)

    monkeypatch.setattr(schedule_command, "write_costs", noted)
    report = tmp_path / "report.json"
    words = ("--budget-tokens", 16, "--dry-run", "--costs", tmp_path / "costs.json", "--json", report)
    assert schedule(own, *words).code == 0
    assert written == [from_json(Costs, json.loads(report.read_text())["costs"])]
