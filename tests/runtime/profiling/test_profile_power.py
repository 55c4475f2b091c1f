"""`sinkprune-profile --power`: joules beside times, and a sensor that dies meanwhile."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import PowerError
from sinkprune.contract.reports.report import OF_TTFT, PARTS
from sinkprune.runtime.commands.power import PowerOptions, wanted_sensor
from sinkprune.runtime.power.meter import measuring
from sinkprune.runtime.profiling.profile import ProfileRounds
from support.programs.commands import assert_refused, run, without_notes, wrote
from support.stand_ins import power_stand_ins as boards
from support.stand_ins.power_stand_ins import SteadyPower, install_tegrastats

ASK = ("--prompt", "What is this?", "--new-tokens", 3)


def test_joules_are_told_for_every_part(
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
    assert power["idle"]["watts"] == pytest.approx(watts) and power["idle"]["seconds"] == pytest.approx(0.5, abs=0.2)
    for name, budget in report["budgets"].items():
        energy, ms = budget["energy"], {part: spread["median"] for part, spread in budget["ms"].items()}
        assert (energy["runs"], energy["left_out"]) == (2, 0)
        assert energy["watts"] == pytest.approx(watts) and set(energy["joules"]) == set(PARTS)
        assert energy["joules"]["latency"]["joules"] == pytest.approx(0, abs=1e-6)
        gross = {part: use["joules_with_idle"] for part, use in energy["joules"].items() if use}
        assert gross["latency"] == pytest.approx(watts * ms["latency"] / 1e3, rel=0.3)
        # On a busy machine, waiting between tokens is longer than any of them.
        assert gross["per_token"] >= 0.9 * watts * ms["per_token"] / 1e3
        assert math.isclose(gross["ttft"] + (report["new_tokens"] - 1) * gross["per_token"], gross["latency"])
        assert math.isclose(sum(gross.get(part, 0.0) for part in OF_TTFT), gross["ttft"])
        assert (energy["joules"]["select"] is None) == (name == "none")
        assert energy["joules"]["preprocess"]["estimated"]
    assert "J a token, 22.43 W meanwhile" in outcome.stdout
    assert "~" in outcome.stdout and "22.43 W when idle (p5 22.43, p95 22.43, " in outcome.stdout
    with Image.open(plot) as drawn:
        assert drawn.width > 800


def test_without_power_nothing_is_told_of_it(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    report = tmp_path / "profile.json"
    outcome = run(
        *("sinkprune-profile", bundle("gqa-112"), "--image", photo_file, *ASK, "--repeat", 1, "--json", report),
    )
    found = json.loads(report.read_text())
    assert outcome.code == 0 and " W " not in outcome.stdout
    assert found["power"] is None and found["budgets"]["none"]["energy"] is None


def test_idle_power_is_subtracted(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    power = SteadyPower(watts=11)
    with measuring(power.sensor, 0.5) as meter:
        power.set_to(watts=33)
        # Waits for a reading: between two, energy is interpolated.
        meter.curve()
        rounds = ProfileRounds(
            pipeline("mha-336"), photo, "What?", ["none"], method="sinkpruner", new_tokens=24, meter=meter
        )
        rounds.measure(3, 1, lambda _: None)
        report = rounds.report()
    energy = report.budgets["none"].energy
    assert energy is not None and report.power is not None
    assert report.power.idle.watts == pytest.approx(11)
    assert energy.watts == pytest.approx(33)
    request = energy.joules["latency"]
    assert request is not None
    assert request.joules / request.joules_with_idle == pytest.approx(22 / 33)


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


@pytest.mark.parametrize(
    ("end", "said"), [("no sensor", "exit code 1: no sensor."), ("silence", "printed no line for 3")]
)
def test_a_sensor_that_dies_while_idle_ends_the_command(
    bundle: Callable[..., Path],
    photo_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
    said: str,
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [boards.ORIN_NANO], last=2, end=end)
    options = ("--power", "tegrastats", "--idle", 0.5, "--json", tmp_path / "x.json")
    assert_refused(run("sinkprune-profile", bundle("gqa-112"), "--image", photo_file, *ASK, *options), said)
    assert not (tmp_path / "x.json").exists()


def test_engines_for_a_gpu_want_a_sensor_that_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def found(backend: str) -> str:
        try:
            sensor = wanted_sensor(PowerOptions(power="auto", idle=None), backend)
        except PowerError as error:
            return str(error)
        return str(sensor and sensor.name)

    assert "rapl: does not cover the GPU; nvml: " in found("tensorrt")
    # Sensors of the machine that runs this test are not known.
    assert "does not cover" not in found("ort-cpu")


def test_idle_power_of_no_sensor_is_refused(bundle: Callable[..., Path], photo_file: Path) -> None:
    outcome = run("sinkprune-profile", bundle("gqa-112"), "--image", photo_file, *ASK, "--idle", 1)
    assert_refused(outcome, "--idle is for the power that --power subtracts")
