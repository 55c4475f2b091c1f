"""`sinkprune-profile --power`: joules beside times, and a sensor that dies meanwhile."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from PIL import Image

from sinkprune.contract.errors import PowerError
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.commands.profile import wanted_sensor
from sinkprune.runtime.power.meter import EnergyMeter, Span
from sinkprune.runtime.power.sensors import Reading, Sensor
from support.programs.commands import run, without_notes, wrote
from support.stand_ins import power_stand_ins as boards
from support.stand_ins.power_stand_ins import install_tegrastats

ASK = ("--prompt", "What is this?", "--new-tokens", 3)


def test_joules_are_told_for_every_budget(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [boards.AGX_ORIN])
    report_file, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    outcome = run(
        *("sinkprune-profile", bundle("mha-336"), "--image", photo_file, *ASK, "--budgets", "retain-64"),
        *("--repeat", 2, "--power", "--idle", 0.5, "--json", report_file, "--plot", plot),
    )
    assert outcome.code == 0, outcome.stderr
    watts, report = 3.150 + 14.312 + 4.968, json.loads(report_file.read_text())
    power = report["power"]
    assert (power["sensor"], power["failure"]) == ("tegrastats", None)
    assert power["measures"] == "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0 of this board"
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


def plain_joules(span: Span) -> float:
    """Of each stretch between two readings, the share that lies inside."""
    used = 0.0
    for before, after in itertools.pairwise(READINGS):
        inside = min(span.end, after.seconds) - max(span.start, before.seconds)
        used += (after.joules - before.joules) * max(0.0, inside) / (after.seconds - before.seconds)
    return used


def test_joules_of_answers_are_those_of_the_readings() -> None:
    answers = [Span(0.51, 1.234), Span(1.3, 1.9), Span(2.0, 2.001)]
    energy = metered(READINGS).budget_energy(answers)
    assert energy is not None and (energy.runs, energy.left_out) == (3, 0)
    gross = [plain_joules(span) for span in answers]
    net = [joules - 3 * (span.end - span.start) for joules, span in zip(gross, answers, strict=True)]
    assert energy.joules_with_idle == pytest.approx(statistics.fmean(gross))
    assert energy.joules == pytest.approx(statistics.fmean(net))
    assert energy.deviation == pytest.approx(statistics.stdev(net))
    assert energy.watts == pytest.approx(sum(gross) / sum(span.end - span.start for span in answers))
    assert not energy.estimated


def test_answers_without_readings_are_left_out() -> None:
    late, never = Span(3.5, 5.0), Span(20, 21)
    energy = metered(READINGS).budget_energy([Span(1, 1.5), late, never])
    assert energy is not None and (energy.runs, energy.left_out) == (1, 2)
    assert metered(READINGS).budget_energy([late]) is None
    gap = [one for one in READINGS if not 1.2 < one.seconds < 2.4]
    energy = metered(gap).budget_energy([Span(1, 2), Span(2.5, 3)])
    assert energy is not None and (energy.runs, energy.left_out) == (1, 1)


def test_a_sensor_that_dies_is_told_and_the_times_are_kept(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [boards.ORIN_NANO], last=10, end="i2c error")
    report_file = tmp_path / "profile.json"
    outcome = run(
        *("sinkprune-profile", bundle("mha-336"), "--image", photo_file, *ASK, "--budgets", "retain-64"),
        *("--repeat", 12, "--power", "tegrastats", "--idle", 0.5, "--json", report_file),
    )
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
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def found(backend: str) -> str:
        try:
            sensor = wanted_sensor(Options(power="auto", idle=None), backend)
        except PowerError as error:
            return str(error)
        return str(sensor and sensor.name)

    assert "rapl: does not cover the GPU; nvml: " in found("tensorrt")
    # Sensors of the machine that runs this test are not known.
    assert "does not cover" not in found("ort-cpu")
