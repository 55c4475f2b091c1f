"""The profile measures budgets and baselines in turn, counts what it says it counts, and tells joules."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Answer, Policy, Request, Session, Stream
from sinkprune.contract.errors import BundleError, PowerError, PromptError, UsageError
from sinkprune.contract.report import ProfileReport, in_order_of_rows, profile_rows
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.policies.profile import PolicyRounds
from sinkprune.runtime.commands import profile
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.hooks import Observer, Rows
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.power.meter import EnergyMeter, Span
from sinkprune.runtime.power.sensors import Reading, Sensor
from sinkprune.runtime.profiling.plot import plot_report
from sinkprune.runtime.profiling.profile import EARLIER, ProfileRounds
from sinkprune.runtime.profiling.rate import RateRun, frame_clock
from sinkprune.runtime.steps.answer import OF_TTFT, PARTS
from support.models.manifests import manifest_data, write_data
from support.programs.commands import interrupt_after, run, succeed, without_notes, wrote
from support.stand_ins import power_stand_ins as boards
from support.stand_ins.power_stand_ins import install_tegrastats

METHODS = ("sinkpruner", "downsample", "downsample-ttft")
POWER = ("--prompt", "What is this?", "--new-tokens", 3, "--budgets", "retain-64", "--idle", 0.5)
Bundles = Callable[..., Path]
Pipelines = Callable[..., Pipeline]


def profiled(
    pipe: Pipeline,
    pictures: Any,
    prompt: Any,
    budgets: list[str],
    *,
    repeat: int = 5,
    warmup: int = 1,
    on_run: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> ProfileReport:
    rounds = ProfileRounds(pipe, pictures, prompt, budgets, **{"method": "sinkpruner", "new_tokens": 16, **options})
    rounds.measure(repeat, warmup, on_run)
    return rounds.report()


def test_stages_are_watched_when_all_engines_have_run_and_the_warm_up_is_not_counted(
    pipeline: Pipelines, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, answers, generate = list[bool](), list[Answer](), Pipeline.generate

    def noting(self: Pipeline, *arguments: Any, observer: Any, **options: Any) -> Answer:
        watched.append(observer.watching)
        answers.append(generate(self, *arguments, observer=observer, **options))
        return answers[-1]

    monkeypatch.setattr(Pipeline, "generate", noting)
    report = profiled(pipeline("gqa-112"), photo, "What?", ["retain-64"], new_tokens=2, repeat=2, warmup=1)
    assert watched == [False] * 2 + [True] * 2 + [False] * 2
    assert all(budget.stage_peak_rss_bytes for budget in report.budgets.values())
    counted = [answer.ms["ttft"] for answer in answers[2:] if answer.budget == "retain-64"]
    assert report.budgets["retain-64"].ms["ttft"].median == pytest.approx(sum(counted) / 2)


@pytest.mark.parametrize("prompt", ["What?", ["First:", "And second:", "What?"]])
def test_warm_runs_reuse_the_pictures_of_a_question_before(
    prompt: str | list[str], pipeline: Pipelines, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, int, int]] = []
    answer = Pipeline.answer

    def recorded(self: Pipeline, request: Request, observer: Observer, new_rows: Callable[[], Rows] = Rows) -> Stream:
        stream = answer(self, request, observer, new_rows)
        found.append((request.texts[-1], stream.rest().reused_towers, request.max_new_tokens))
        return stream

    pictures = [photo] if isinstance(prompt, str) else [photo, photo.rotate(90)]
    count = len(pictures)
    pipe = pipeline("gqa-112", "fp32", max_images=count)
    monkeypatch.setattr(Pipeline, "answer", recorded)
    report = profiled(pipe, pictures, prompt, ["retain-64"], new_tokens=2, repeat=2, warmup=1, new_session=Session)
    assert found == [("What?", 0, 2), (EARLIER, 0, 1), ("What?", count, 1)] * 6
    for budget in report.budgets.values():
        assert budget.warm_ttft_ms is not None and 0 < budget.warm_ttft_ms.median <= budget.warm_ttft_ms.p95
    alone = profiled(pipe, pictures, prompt, ["retain-64"], new_tokens=2, repeat=1, warmup=0)
    assert alone.budgets["retain-64"].warm_ttft_ms is None


def test_nonsense_repetitions_are_refused(pipeline: Pipelines, photo: Image.Image) -> None:
    with pytest.raises(UsageError, match=r"^repeat is 0, expected a whole number from 1 to 100000\.$"):
        profiled(pipeline("gqa-112"), photo, "What?", [], repeat=0)
    with pytest.raises(UsageError, match=r"^warmup is -1, expected a whole number from 0 to 100000\.$"):
        profiled(pipeline("gqa-112"), photo, "What?", [], warmup=-1)
    with pytest.raises(UsageError, match="max_new_tokens is 0"):
        profiled(pipeline("gqa-112"), photo, "What?", [], new_tokens=0)


def test_nothing_of_the_time_to_the_first_token_is_unaccounted_for(pipeline: Pipelines, photo: Image.Image) -> None:
    answer = pipeline("gqa-112").generate(photo, "What?", budget="retain-64", max_new_tokens=2)
    parts = [answer.ms[part] for part in OF_TTFT]
    assert all(part is not None and part > 0 for part in parts)
    assert sum(part or 0.0 for part in parts) == pytest.approx(answer.ms["ttft"])
    assert set(PARTS) - set(OF_TTFT) == {"select", "ttft", "per_token", "latency"}


def test_a_length_that_one_budget_does_not_take_is_refused_before_any_runs(
    pipeline: Pipelines, photo: Image.Image
) -> None:
    pipe, ran = pipeline("gqa-112"), list[str]()
    positions = pipe.bundle.manifest.language_model.max_positions
    text = pipe.prompts.encode(["", "What?"]).text_tokens
    unpruned = pipe.generate(photo, "What?", max_new_tokens=1).visual_tokens
    left = positions - text - unpruned
    # Fits at retain-32, and not unpruned.
    said = rf"{text} text tokens, {unpruned} visual tokens and up to {left + 1} .* ask for at most {left} new tokens"
    with pytest.raises(PromptError, match=said):
        profiled(pipe, photo, "What?", ["retain-32"], new_tokens=left + 1, on_run=ran.append)
    with pytest.raises(PromptError, match=f"ask for at most {left} new tokens"):
        RateRun(pipe, [photo], "What?", ["retain-32", "none"], frame_clock(1, 1), new_tokens=left + 1)
    assert ran == []


@pytest.mark.parametrize("complete", [0, 2])
def test_an_interrupted_command_reports_the_complete_rounds(
    complete: int, bundle: Bundles, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two budgets, a round of warm-up, and one run of the next round.
    monkeypatch.setattr(Pipeline, "generate", interrupt_after(2 * (1 + complete) + 1, Pipeline.generate))
    report_file = tmp_path / "x.json"
    options = ("--budgets", "retain-64", "--repeat", 4, "--new-tokens", 2, "--json", report_file)
    outcome = run("sinkprune-profile", bundle("gqa-112"), "--image", photo_file, "--prompt", "What?", *options)
    assert outcome.code == 130
    if not complete:
        assert without_notes(outcome.stderr) == "interrupted; no whole round was measured, so nothing was kept.\n"
        assert not report_file.exists()
        return
    said = "the report counts 2 of 4 rounds."
    assert outcome.stderr.endswith(f"interrupted; {said}\n")
    report = json.loads(report_file.read_text())
    # The photo is 600x400.
    assert (report["repeat"], report["seen_share"]) == (2, [pytest.approx(2 / 3, abs=0.01)])
    assert "median (95th percentile) of 2 interleaved runs" in outcome.stdout
    assert report["interrupted"] == said


def test_a_stage_that_keeps_others_than_told_is_refused(bundle: Bundles, photo: Image.Image, tmp_path: Path) -> None:
    root = Path(shutil.copytree(bundle("gqa-112", "fp32", ("retain-64",)), tmp_path / "bundle"))
    data = manifest_data(root)
    counts = data["plans"]["sinkpruner"]["retain-64"]["counts"]
    assert counts["stages"] != [5]
    counts["stages"] = [5]
    write_data(root, data)
    with pytest.raises(BundleError, match=r"kept \d+ visual tokens, the bundle says \d+"):
        Pipeline.load(root).generate(photo, "What is this?", budget="retain-64", max_new_tokens=1)


def export(checkpoint: Path, output: Path, methods: tuple[str, ...], budgets: tuple[str, ...], images: int) -> Path:
    """A bundle of SinkPruner and of smaller pictures."""
    export_bundle(ExportRequest(str(checkpoint), budgets=budgets, methods=methods, max_images=images), output)
    return output


def test_rows_are_the_unpruned_engines_then_baselines_then_the_method() -> None:
    plans = {"fastv": {"a", "b"}, "downsample-ttft": {"a"}, "downsample": {"a", "b", "c"}}
    rows = ["fastv none", "downsample b", "downsample a", "downsample-ttft a", "fastv b", "fastv a"]
    assert [" ".join(row) for row in profile_rows(plans, "fastv", ["b", "none", "a", "b"])] == rows
    assert [row.method for row in profile_rows(plans, "downsample-ttft", ["a"])] == ["downsample-ttft"] * 2
    assert in_order_of_rows(["random", "downsample-ttft", "a"]) == ["downsample-ttft", "random", "a"]


def test_baselines_run_in_the_same_rounds(
    checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    root = export(checkpoint("qwen3-vl"), tmp_path / "bundle", METHODS, ("prune-88.9",), 1)
    pipe, order = Pipeline.load(root), list[str]()
    options = {"method": "sinkpruner", "new_tokens": 2, "new_session": Session}
    rounds = ProfileRounds(pipe, photo, "What?", ["prune-88.9"], **options)
    rounds.measure(2, 0, order.append)
    report = rounds.report()
    assert order == ["none", *["prune-88.9"] * 3, *["prune-88.9"] * 3, "none"]
    assert (report.method, rounds.kinds, list(report.budgets)) == ("sinkpruner", 4, ["none", "prune-88.9"])
    assert {name: list(each) for name, each in report.baselines.items()} == {
        name: ["prune-88.9"] for name in METHODS[1:]
    }
    assert list(report.rows()) == ["none", "downsample prune-88.9", "downsample-ttft prune-88.9", "prune-88.9"]
    own, smaller = report.budgets["prune-88.9"], report.baselines["downsample"]["prune-88.9"]
    alone = pipe.generate(photo, "What?", budget="prune-88.9", method="downsample", max_new_tokens=2)
    assert smaller.tokens_per_layer == tuple(alone.tokens_per_layer)
    assert len(set(smaller.tokens_per_layer)) == 1 < len(set(own.tokens_per_layer))
    # The tower works less too, which pruning does not change.
    assert smaller.flops.ttft - smaller.flops.prefill < own.flops.ttft - own.flops.prefill
    assert smaller.warm_ttft_ms is not None
    assert plot_report(report, ".png").startswith(b"\x89PNG")


def test_a_policy_s_baseline_runs_at_each_number_of_steps(
    checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    policy = Policy.load(export(checkpoint("pi0"), tmp_path / "bundle", METHODS[:2], ("prune-77.8",), 2))
    rounds = PolicyRounds(
        policy, [photo, None], "go", (0.5, 0.1, -0.2, 0.3, 0.4), ["prune-77.8"], [3, 2], method="sinkpruner"
    )
    rounds.measure(1, 0, lambda _: None)
    report = rounds.report()
    assert (rounds.kinds, list(report.rows())) == (6, ["none", "downsample prune-77.8", "prune-77.8"])
    smaller = report.baselines["downsample"]["prune-77.8"]
    assert list(smaller.chunks) == ["3", "2"] and len(set(smaller.tokens_per_layer)) == 1


def test_joules_are_told_for_every_budget(
    bundle: Bundles, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [boards.AGX_ORIN])
    report_file, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    ask = ("--image", photo_file, *POWER, "--repeat", 2, "--power", "--json", report_file, "--plot", plot)
    outcome = succeed("sinkprune-profile", bundle("mha-336"), *ask)
    watts, report = 3.150 + 14.312 + 4.968, json.loads(report_file.read_text())
    power = report["power"]
    assert (power["sensor"], power["failure"]) == ("tegrastats", None)
    assert 80 < power["period_ms"] < 250 and power["longest_gap_ms"] >= power["period_ms"]
    assert power["idle_watts"] == pytest.approx(watts)
    for budget in report["budgets"].values():
        energy, latency = budget["energy"], budget["ms"]["latency"]["median"] / 1e3
        assert (energy["runs"], energy["left_out"]) == (2, 0)
        assert energy["watts"] == pytest.approx(watts) and energy["joules"] == pytest.approx(0, abs=1e-6)
        assert energy["joules_with_idle"] == pytest.approx(watts * latency, rel=0.3)
    assert "J an answer, 22.43 W meanwhile" in outcome.stdout and "22.43 W when idle subtracted" in outcome.stdout
    with Image.open(plot) as drawn:
        assert drawn.width > 800


READINGS = [Reading(0.05 * number, 0.4 * number + 0.01 * number**2) for number in range(80)]
"""Of almost four seconds."""


def metered(readings: list[Reading]) -> EnergyMeter:
    """A meter of a sensor that has died after these readings; 3 W are idle power."""

    def read() -> Generator[Reading]:
        yield from readings
        raise PowerError("dead")

    meter = EnergyMeter(Sensor("rapl", "a stand-in", read))
    while meter.failure is None:
        time.sleep(0.001)
    meter.idle_watts = 3.0
    return meter


def test_joules_of_answers_are_those_of_the_readings() -> None:
    answers = [Span(0.51, 1.234), Span(1.3, 1.9), Span(2.0, 2.001)]
    energy = metered(READINGS).budget_energy(answers)
    assert energy is not None and (energy.runs, energy.left_out) == (3, 0)
    moments, joules = zip(*READINGS, strict=True)
    gross = [float(np.diff(np.interp([span.start, span.end], moments, joules))[0]) for span in answers]
    net = [used - 3 * (span.end - span.start) for used, span in zip(gross, answers, strict=True)]
    assert energy.joules_with_idle == pytest.approx(statistics.fmean(gross))
    assert energy.joules == pytest.approx(statistics.fmean(net))
    assert energy.deviation == pytest.approx(statistics.stdev(net))
    assert energy.watts == pytest.approx(sum(gross) / sum(span.end - span.start for span in answers))
    assert not energy.estimated


def test_answers_without_readings_are_left_out() -> None:
    late, never, gap = Span(3.5, 5.0), Span(20, 21), [one for one in READINGS if not 1.2 < one.seconds < 2.4]
    for readings, answers, left_out in (
        (READINGS, [Span(1, 1.5), late, never], 2),
        (gap, [Span(1, 2), Span(2.5, 3)], 1),
    ):
        energy = metered(readings).budget_energy(answers)
        assert energy is not None and (energy.runs, energy.left_out) == (1, left_out)
    assert metered(READINGS).budget_energy([late]) is None


def test_a_sensor_that_dies_is_told_and_the_times_are_kept(
    bundle: Bundles, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [boards.ORIN_NANO], last=10, end="i2c error")
    report_file = tmp_path / "profile.json"
    ask = ("--image", photo_file, *POWER, "--repeat", 12, "--power", "tegrastats", "--json", report_file)
    outcome = run("sinkprune-profile", bundle("mha-336"), *ask)
    assert outcome.code == 2
    said = without_notes(outcome.stderr)
    assert said.startswith(f"{wrote(report_file)}error: ") and said.count("\n") == 2
    assert "ended with exit code 1: i2c error. Times are whole; joules are missing from then on." in outcome.stderr
    report = json.loads(report_file.read_text())
    assert "i2c error" in report["power"]["failure"]
    for budget in report["budgets"].values():
        assert budget["ms"]["latency"]["median"] > 0
        assert budget["energy"] is None or budget["energy"]["left_out"] > 0
    assert "retain-64" in outcome.stdout


def test_engines_for_a_gpu_want_a_sensor_that_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool] = []
    monkeypatch.setattr(profile, "open_sensor", lambda name, *, on_gpu: wanted.append(on_gpu))
    for backend in ("tensorrt", "ort-cpu"):
        profile.wanted_sensor(Options(power="auto", idle=None), backend)
    assert wanted == [True, False]
