"""Power sensors on stand-ins: their joules, and their errors."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from sinkprune.contract.errors import NoSensorError, PowerError
from sinkprune.runtime.power import sensors as power_sensor
from sinkprune.runtime.power.meter import measuring
from sinkprune.runtime.power.sensors import Reading, Sensor, integrated, open_sensor, parse_rails, total_rails
from support.stand_ins import power_stand_ins as boards
from support.stand_ins.power_stand_ins import Powercap, install_pynvml, install_tegrastats

UNSUPPORTED = "NVMLError_NotSupported"
RAIL, OTHER_RAIL = "VDD_IN 4000mW/1mW", "VDD_SOC 9000mW/1mW"


def readings(sensor: Sensor, count: int) -> list[Reading]:
    """Return the first readings of a sensor."""
    with closing(sensor.readings()) as found:
        return list(islice(found, count))


def watts(found: list[Reading]) -> float:
    return (found[-1].joules - found[0].joules) / (found[-1].seconds - found[0].seconds)


@pytest.mark.parametrize(
    ("line", "expected", "rails"),
    [
        (boards.ORIN_NANO_BUSY, 12.479, "VDD_IN"),
        (boards.AGX_ORIN_7_2, 9.110, "VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0"),
    ],
)
def test_tegrastats_counts_joules_of_the_whole_board(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, expected: float, rails: str
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", [line])
    sensor = open_sensor("auto", on_gpu=True, root=tmp_path)
    assert (sensor.name, sensor.measures) == ("tegrastats", f"{rails} of this board")
    found = readings(sensor, 4)
    assert watts(found) == pytest.approx(expected)
    assert 0.25 < found[-1].seconds - found[0].seconds < 2
    assert found[0].joules == 0


def test_time_stamps_that_jump_and_other_lines_change_no_joules(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jumping = [
        boards.ORIN_NANO.replace("04-27-2026 14:59:41", moment)
        for moment in ("01-01-1970 00:00:07", "11-22-2026 06:00:00", "11-21-2026 23:59:59")
    ]
    install_tegrastats(monkeypatch, tmp_path / "bin", ["tegrastats: warning", *jumping, "VDD_CPU_GPU_CV 5mW/5mW"])
    with measuring(open_sensor("tegrastats", on_gpu=False), 1.0) as meter:
        assert meter.idle_watts == pytest.approx(4.761)
        report = meter.report()
    assert report.failure is None and 80 < report.period_ms < 250
    assert "power" not in {thread.name for thread in threading.enumerate()}


def test_joules_of_a_power_follow_the_trapezoidal_rule() -> None:
    powers = (power for power in [(5.0, 2.0), (6.0, 4.0), (8.0, 0.0)])
    assert [*integrated(powers)] == [(5, 0), (6, 3), (8, 7)]


@pytest.mark.parametrize(
    ("lines", "last", "end", "message"),
    [
        ([boards.WITHOUT_RAILS], None, "", "prints no power rails. Some boards print them for root only"),
        ([boards.XAVIER], None, "", "prints the rails CPU, GPU, SOC, SYS5V, VDDRQ, expected VIN, or VDD_IN, or "),
        ([boards.THOR], 3, "no ina3221.", r"bin/tegrastats' ended with exit code 1: no ina3221\.$"),
        ([boards.THOR], 2, "silence", r"has printed no line for 3 seconds\.$"),
        ([RAIL, RAIL, *[OTHER_RAIL] * 1000], None, "", r"has printed no VDD_IN for 3 seconds\.$"),
    ],
    ids=["no rails", "unknown rails", "ended", "silent", "lost rail"],
)
def test_a_tegrastats_that_fails_is_not_replaced_by_another_sensor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str], last: int | None, end: str, message: str
) -> None:
    install_tegrastats(monkeypatch, tmp_path / "bin", lines, last, end)
    Powercap(tmp_path)
    with pytest.raises(PowerError, match=message):
        readings(open_sensor("auto", on_gpu=False, root=tmp_path), 4)


def test_rapl_counts_packages_and_memory_once_and_past_their_range(tmp_path: Path) -> None:
    tree = Powercap(tmp_path, microjoules=Powercap.RANGE - 500_000)
    sensor = open_sensor("rapl", on_gpu=False, root=tmp_path)
    assert sensor.measures == "package-0 + dram of this machine's processors"
    with tree.drawing(watts=40):
        found = readings(sensor, 25)
    assert found[-1].joules > 0.6
    assert watts(found) == pytest.approx(44, rel=0.2)


def test_a_counter_that_stands_still_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_sensor, "SILENT_SECONDS", 1.0)
    Powercap(tmp_path)
    with pytest.raises(PowerError, match=r"^the RAPL counter has not moved for 1 seconds\.$"):
        readings(open_sensor("rapl", on_gpu=False, root=tmp_path), 1)


def test_the_error_for_a_counter_of_root_explains_how_to_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Powercap(tmp_path)
    read_text = Path.read_text

    def refuse(path: Path) -> str:
        if path.name == "energy_uj":
            raise PermissionError
        return read_text(path)

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(PowerError, match="energy_uj' may not be read: no permission") as refused:
        open_sensor("auto", on_gpu=False, root=tmp_path)
    assert not isinstance(refused.value, NoSensorError)
    assert f"sudo chmod a+r {tmp_path}/sys/class/powercap/intel-rapl:*/energy_uj" in str(refused.value)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Installs a GPU, and changes what NVIDIA's library answers."""
    state = install_pynvml(monkeypatch, tmp_path / "nvml")

    def change(**answers: object) -> None:
        state.write_text(json.dumps(json.loads(state.read_text()) | answers))

    return change


def test_nvml_counts_the_joules_of_the_gpu_or_reads_its_power(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Callable[..., None]
) -> None:
    monkeypatch.setenv("PATH", "")
    Powercap(tmp_path)
    sensor = open_sensor("auto", on_gpu=True, root=tmp_path)
    assert (sensor.name, sensor.measures) == ("nvml", "NVIDIA H100 GPU-0, the board")
    assert watts(readings(sensor, 5)) == pytest.approx(300, rel=0.05)
    answer(milliwatts_counted=UNSUPPORTED)
    sensor = open_sensor("nvml", on_gpu=True)
    assert watts(readings(sensor, 5)) == pytest.approx(300) and "average over a second" in sensor.measures


@pytest.mark.parametrize(
    ("visible", "order", "gpu"),
    [("GPU-abc,GPU-def", "", "GPU-abc"), ("2,0", "PCI_BUS_ID", "GPU-2"), ("2,0", "", None), ("", "PCI_BUS_ID", None)],
)
def test_of_several_gpus_the_one_that_computes_must_be_known(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., None], visible: str, order: str, gpu: str | None
) -> None:
    answer(count=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    if gpu is None:
        with pytest.raises(PowerError, match=r"has 4 GPUs, and the one in use is not known\. Set CUDA_VIS"):
            open_sensor("nvml", on_gpu=True)
    else:
        assert f"NVIDIA H100 {gpu}, " in open_sensor("nvml", on_gpu=True).measures


@pytest.mark.parametrize(
    ("answers", "said", "absent"),
    [
        ({"init": "NVMLError_LibraryNotFound"}, "NVIDIA's driver does not answer: NVMLError_LibraryNotFound", True),
        ({"count": 0}, "finds no GPU", True),
        ({"milliwatts_counted": "NVMLError_NoPermission"}, "may not be read: no permission. Run", False),
        ({"milliwatts_counted": UNSUPPORTED, "milliwatts": UNSUPPORTED}, f"cannot be read: {UNSUPPORTED}", False),
        ({"name": "NVMLError_LibraryNotFound"}, "power cannot be read: NVMLError_LibraryNotFound", False),
    ],
)
def test_a_gpu_that_cannot_be_read_is_rejected(
    answer: Callable[..., None], answers: dict[str, object], said: str, absent: bool
) -> None:
    answer(**answers)
    with pytest.raises(PowerError, match=said) as refused:
        open_sensor("nvml", on_gpu=True)
    assert isinstance(refused.value, NoSensorError) == absent


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_error_without_a_sensor_names_all_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_gpu: bool
) -> None:
    """With a GPU, also a counter that does not cover it."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    if on_gpu:
        Powercap(tmp_path)
    rapl = "does not cover the GPU" if on_gpu else "there is no RAPL counter of a processor below '.*"
    tried = f"^no power sensor was found. Tried tegrastats: there is no .*; rapl: {rapl}; nvml: nvidia-ml-py is not"
    with pytest.raises(NoSensorError, match=tried):
        open_sensor("auto", on_gpu=on_gpu, root=tmp_path)


@pytest.mark.parametrize(
    ("line", "total"),
    [
        (boards.ORIN_NANO, 4761),
        (boards.ORIN_NX_7_2, 7280),
        (boards.AGX_ORIN, 3150 + 14312 + 4968),
        (boards.AGX_ORIN_7_2, 3034 + 1137 + 4939),
        (boards.THOR, 26686),
        (boards.THOR.replace(" VIN 26686mW/26686mW", ""), 3561 + 7910 + 7620),
        (boards.TX2, 5297),
        (boards.XAVIER, None),
        (boards.AGX_ORIN.replace("VDD_CPU_CV 14312mW", "VDD_CPU_CV mW"), None),
        # Cut off where the command ended: this is not 9 mW.
        ("RAM 1/2MB (lfb 1x4MB) VDD_IN 9", None),
        ("", None),
    ],
)
def test_the_total_of_rails(line: str, total: int | None) -> None:
    rails = parse_rails(line)
    assert sum(rails[name] for name in total_rails(rails)) == (total or 0)
    assert bool(total_rails(rails)) == (total is not None)
    if line == boards.XAVIER:
        assert rails == {"GPU": 0, "CPU": 311, "SOC": 932, "VDDRQ": 621, "SYS5V": 1482}
