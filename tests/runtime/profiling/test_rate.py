"""`sinkprune-profile --rate`: frames, what is told of them, and what the machine was like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.power.sensors import read_conditions
from sinkprune.runtime.profiling.rate import RateRun, frame_clock
from support.programs.commands import assert_refused, interrupt_after, run, succeed
from support.stand_ins import power_stand_ins as boards
from support.stand_ins.power_stand_ins import install_tegrastats

ASK = ("--prompt", "What is this?", "--new-tokens", 2, "--budgets", "none,retain-64")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root with two zones of one kind, one that is asleep, clocks of two clusters and of a GPU."""
    files = {
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
        "sys/class/thermal/thermal_zone0/temp": "48500",
        "sys/class/thermal/thermal_zone1/type": "acpitz",
        "sys/class/thermal/thermal_zone1/temp": "20000",
        "sys/class/thermal/thermal_zone2/type": "acpitz",
        "sys/class/thermal/thermal_zone2/temp": "-5000",
        "sys/class/thermal/thermal_zone3/type": "cv0-thermal",
        "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq": "1510400",
        "sys/devices/system/cpu/cpufreq/policy4/scaling_cur_freq": "729600",
        "sys/class/devfreq/17000000.gpu/cur_freq": "306000000",
        "sys/class/devfreq/15340000.vic/cur_freq": "115200000",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    return tmp_path


def test_budgets_follow_each_other_at_the_rate(
    pipeline: Callable[..., Pipeline], photo: Image.Image, machine: Path
) -> None:
    class Told(list[list[Image.Image]]):
        asked: ClassVar[list[int]] = []

        def __getitem__(self, place: Any) -> Any:
            self.asked.append(place)
            return super().__getitem__(place)

    shown: list[tuple[str, int]] = []
    pictures, budgets = Told([[photo], [photo.rotate(90)]]), ["none", "retain-64"]
    run = RateRun(pipeline("gqa-112"), pictures, "What?", budgets, frame_clock(20, 0.5), new_tokens=2, root=machine)
    pictures.asked.clear()
    report = run.measure(on_frames=lambda budget, frames: shown.append((budget, frames)))
    # One for the warm-up, then each frame's
    answered = [budget.answered_frames for budget in report.rates.values()]
    assert pictures.asked == [place for frames in answered for place in (0, *(frame % 2 for frame in frames))]
    assert (report.rate_hz, report.duration_s, report.pictures) == (20, 0.5, 2)
    # The photo is 600x400, and the model sees a square of it.
    assert report.seen_share == pytest.approx(2 / 3, abs=0.01)
    assert list(report.rates) == ["none", "retain-64"]
    for name, budget in report.rates.items():
        assert budget.frames == 10 == budget.answered + budget.missed
        assert budget.answered == len(budget.answered_frames) == len(budget.answer_latency_ms)
        assert sum(frames for told, frames in shown if told == name) == budget.answered_frames[-1] + 1
        assert budget.answered_frames[0] == 0 and list(budget.answered_frames) == sorted(set(budget.answered_frames))
        assert budget.seconds >= 0.5 and budget.energy is None
        late, busy = budget.latency_ms, budget.busy_ms
        assert 0 < busy.p50 <= late.p50 <= late.p95 <= late.p99 <= late.maximum == max(budget.answer_latency_ms)
    none, pruned = report.rates.values()
    assert none.start_s == 0 and pruned.start_s >= 0.5
    assert none.visual_tokens == none.kept_after_sanitizer > pruned.kept_after_sanitizer
    conditions = report.conditions
    temperatures = {"cpu-thermal": 48.5, "acpitz": 20.0, "acpitz 2": -5.0}
    for found, expected in (
        (conditions.temperatures_c, temperatures),
        (conditions.clocks_mhz, {"cpu": 1120.0, "gpu": 306.0}),
    ):
        assert found == {name: (value,) * len(conditions.seconds) for name, value in expected.items()}
    assert read_conditions(machine / "nowhere") == ({}, {})
    assert len(conditions.seconds) >= 3
    assert conditions.seconds[0] < 0 and conditions.seconds[-1] >= 1.0


def test_an_interrupted_command_reports_the_answers_so_far(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A warm-up of each budget, ten frames of the first, and one of the second.
    monkeypatch.setattr(Pipeline, "generate", interrupt_after(13, Pipeline.generate))
    written, moved = tmp_path / "x.json", tmp_path / "x.interrupted.json"
    written.write_text("precious")
    options = ("--rate", 5, "--duration", 2, "--warmup-rounds", 1, "--json", written)
    outcome = run("sinkprune-profile", bundle("gqa-112"), "--image", photo_file, *ASK, *options)
    assert outcome.code == 130 and written.read_text() == "precious"
    said = "the report has the 11 answers so far."
    assert outcome.stderr.endswith(f"interrupted; {said} Earlier files stay; these results are in '{moved}'.\n")
    report = json.loads(moved.read_text())
    assert report["interrupted"] == said
    none, pruned = report["rates"].values()
    assert (none["frames"], none["answered"], none["missed"]) == (10, 10, 0)
    assert (pruned["frames"], pruned["answered"], pruned["missed"]) == (1, 1, 0)
    assert none["seconds"] >= 2 and 0 < pruned["seconds"] < 1
    ran = f"5 frames a second for {round(pruned['seconds'], 1):g} to 2 s; milliseconds"
    assert ran in outcome.stdout


@pytest.fixture
def frames(photo: Image.Image, tmp_path: Path) -> Path:
    """A folder of three pictures, and a file that is hidden."""
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(3):
        photo.crop((40 * number, 0, 400 + 40 * number, 400)).save(folder / f"{number}.png")
    (folder / ".listing").write_text("no picture")
    return folder


def test_the_command_writes_and_draws_a_rate(
    bundle: Callable[..., Path], frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [boards.THOR, boards.THOR_IDLE])
    report_file, plot = tmp_path / "rate.json", tmp_path / "rate.png"
    options = ("--rate", 10, "--duration", 1, "--power", "--idle", 1, "--json", report_file, "--plot", plot)
    outcome = succeed("sinkprune-profile", bundle("gqa-112"), "--frames", frames, *ASK, *options)
    assert "Of fewer than 20 answers, p95 and p99 are close to the slowest." in outcome.stdout
    assert "joules by tegrastats (VIN of this board), a reading every " in outcome.stdout
    report = json.loads(report_file.read_text())
    assert (report["pictures"], report["seen_share"]) == (3, 1)
    for budget in report["rates"].values():
        assert budget["frames"] == 10
        energy, seconds = budget["energy"], budget["seconds"] / budget["answered"]
        # Readings more than a second apart, as on a busy machine, give no joules.
        assert energy or report["power"]["longest_gap_ms"] > 1000
        if energy:
            assert energy["watts"] == pytest.approx(27.8, abs=0.6)
            assert energy["joules_per_frame_with_idle"] == pytest.approx(energy["watts"] * seconds)
            idle = report["power"]["idle_watts"] * seconds
            assert energy["joules_per_frame"] == pytest.approx(energy["joules_per_frame_with_idle"] - idle, abs=1e-6)
    with Image.open(plot) as drawn:
        assert drawn.width > 800


def test_options_that_mean_nothing_are_refused(
    bundle: Callable[..., Path], photo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    for given, said in (
        (("--rate", 5, "--repeat", 3), "--repeat counts rounds, and --rate goes by time"),
        (("--rate", 5, "--warm"), "--warm asks twice about a picture, and --rate shows each once"),
        (("--duration", 3), "--duration is for frames at a steady rate. Add --rate, or leave it out."),
        (("--rate", 5, "--power", "tegrastats"), "there is no 'tegrastats' in PATH"),
        (("--idle", "0.1"), "--idle is 0.1, expected from 0.5 to 3600 seconds."),
    ):
        assert_refused(run("sinkprune-profile", bundle("gqa-112"), "--image", photo_file, *ASK, *given), said)
