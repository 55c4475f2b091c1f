"""Stand-ins for power sensors: lines that boards printed, a tree of counters, a module."""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sinkprune.runtime.power import sensors as rapl

ORIN_NANO = (
    "04-27-2026 14:59:41 RAM 775/7620MB (lfb 3x4MB) SWAP 0/3810MB (cached 0MB) CPU [1%@729,0%@729,0%@729,0%@729,"
    "0%@729,0%@729] GR3D_FREQ 0% cpu@48.468C soc2@47.531C soc0@48.062C gpu@48.562C tj@49.156C soc1@49.156C "
    "VDD_IN 4761mW/4778mW VDD_CPU_GPU_CV 515mW/501mW VDD_SOC 1428mW/1428mW "
)
"""JetPack 6, Orin Nano, for a user without root's rights."""
ORIN_NANO_BUSY = (
    "11-15-2024 08:38:09 RAM 6185/7620MB (lfb 8x2MB) SWAP 851/3810MB (cached 1MB) CPU [15%@729,11%@729,14%@729,"
    "13%@729,11%@729,8%@729] EMC_FREQ 43%@2133 GR3D_FREQ 63%@[621] NVDEC off NVJPG off NVJPG1 off VIC off "
    "OFA off APE 200 cpu@53.968C soc2@52.437C soc0@50.75C gpu@53.343C tj@53.968C soc1@51.656C VDD_IN 12479mW/12479mW "
    "VDD_CPU_GPU_CV 4667mW/4667mW VDD_SOC 2817mW/2817mW"
)
"""JetPack 6, Orin Nano, for root."""
ORIN_NX_7_2 = (
    "10-01-2026 20:36:35 RAM 2432/15598MB (lfb 4x4MB) SWAP 0/6144MB (cached 0MB) CPU [55%@1036,9%@1036,24%@1036,"
    "64%@1036,off,off,0%@729,0%@729] GR3D_FREQ 0% cv0@56.281C/56.281C cpu@57.156C/57.156C gpu@55.343C/55.343C "
    "tj@59.687C/59.687C VDD_IN 7280mW/7280mW/7280mW"
)
"""JetPack 7.2, Orin NX with two cores off."""
AGX_ORIN = (
    "11-21-2025 08:49:48 RAM 13983/62780MB (lfb 424x4MB) SWAP 126/31390MB (cached 0MB) CPU [90%@2201,100%@2201,"
    "100%@2201,100%@2201] EMC_FREQ 1%@2133 GR3D_FREQ 14%@[407,407] VIC_FREQ 115 NVDLA0_FREQ @1600 APE 174 "
    "CV0@73.625C CPU@77.281C Tboard@62C GPU@69.125C tj@77.281C CV2@-256C VDD_GPU_SOC 3150mW/2971mW "
    "VDD_CPU_CV 14312mW/12415mW VIN_SYS_5V0 4968mW/5048mW VDDQ_VDD2_1V8AO 1091mW/1091mW"
)
"""JetPack 6, AGX Orin, for root."""
AGX_ORIN_7_2 = (
    "10-01-2026 11:05:58 RAM 8207/62878MB (lfb 80x4MB) CPU [9%@729,8%@729,9%@729,7%@729,3%@1190,19%@1190] "
    "GR3D_FREQ 12%@[1300,1300] cpu@47.906C/48.343C tj@47.906C/48.343C VDD_GPU_SOC 3034mW/3049mW/3412mW "
    "VDD_CPU_CV 1137mW/1296mW/2273mW VIN_SYS_5V0 4939mW/4924mW/5040mW"
)
"""JetPack 7.2, AGX Orin without swap."""
THOR = (
    "07-31-2026 14:45:55 RAM 86905/125772MB (lfb 368x4MB) CPU [12%@972,10%@972,off,33%@1890] cpu@39.812C tj@39.906C "
    "soc012@38.812C gpu@39.906C soc345@38.625C VDD_GPU 3561mW/3561mW VDD_CPU_SOC_MSS 7910mW/7910mW "
    "VIN_SYS_5V0 7620mW/7620mW VIN 26686mW/26686mW"
)
"""JetPack 7.1, Thor."""
THOR_IDLE = (
    "08-08-2026 20:58:23 RAM 3429/125749MB (lfb 120x4MB) CPU [0%,5%,off]@2601 EMC_FREQ @4266 "
    "GR3D_FREQ @[1574,1574,1574] NVENC0_FREQ @1691 VIC off cpu@49.75C/49.75C tj@51.218C/51.218C "
    "VDD_GPU 6330mW/6330mW/6330mW VIN 28906mW/14453mW/28906mW"
)
"""JetPack 7.2, Thor: one clock for all cores, and no percentages."""
TX2 = (
    "RAM 3276/7859MB (lfb 5x4MB) SWAP 1626/12122MB (cached 181MB) CPU [44%@1421,49%@2031,67%@2034,17%@1420] "
    "EMC_FREQ 1%@1866 GR3D_FREQ 10%@1300 APE 150 MTS fg 1% bg 1% PLL@42.5C PMIC@50C GPU@39.5C thermal@41.3C "
    "VDD_SYS_GPU 182/182 VDD_4V0_WIFI 0/0 VDD_IN 5297/5297 VDD_SYS_DDR 1241/1241"
)
"""JetPack 4, TX2: values without units."""
WITHOUT_RAILS = (
    "RAM 2130/7774MB (lfb 1004x4MB) SWAP 0/3887MB (cached 0MB) CPU [11%@1190] EMC_FREQ 0% GR3D_FREQ 0% CPU@33C"
)
"""JetPack 4, Xavier NX, for a user without root's rights."""
XAVIER = (
    "RAM 721/31927MB (lfb 7291x4MB) CPU [2%@1190,off] GPU 0/0 CPU 311/311 SOC 932/932 VDDRQ 621/621 SYS5V 1482/1482"
)
"""JetPack 4, AGX Xavier: rails without a known total."""

# Prints its lines in turn, at the interval of --interval. After `last` lines it ends, or falls silent.
_TEGRASTATS = """#!{python} -S
import sys, time
interval = int(sys.argv[sys.argv.index("--interval") + 1]) / 1e3
lines, last, end = {lines!r}, {last!r}, {end!r}
number = 0
while last is None or number < last:
    sys.stdout.write(lines[number % len(lines)] + "\\n")
    sys.stdout.flush()
    number += 1
    time.sleep(interval)
if end == "silence":
    time.sleep(600)
sys.exit(end)
"""


def install_tegrastats(
    monkeypatch: pytest.MonkeyPatch, folder: Path, lines: Sequence[str], last: int | None = None, end: str = "silence"
) -> Path:
    """Put a `tegrastats` that prints `lines` in turn into an otherwise empty PATH, and return its path.

    After `last` lines it falls silent, or ends with exit code 1 and the words `end`.
    """
    folder.mkdir(exist_ok=True)
    command = folder / "tegrastats"
    command.write_text(_TEGRASTATS.format(python=sys.executable, lines=list(lines), last=last, end=end))
    command.chmod(command.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    monkeypatch.setenv("PATH", str(folder))
    return command


class Powercap:
    """A tree like /sys/class/powercap below `root`: a package with its cores, memory, and the platform."""

    RANGE = 262_143_328_850

    def __init__(self, root: Path, microjoules: int = 1_000_000) -> None:
        self._folder = root / "sys/class/powercap"
        self._microjoules = 0
        self._first = microjoules
        names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram"}
        # The whole machine, and a second view of the package.
        names |= {"intel-rapl:1": "psys", "intel-rapl-mmio:0": "package-0"}
        for zone, name in names.items():
            (self._folder / zone).mkdir(parents=True)
            (self._folder / zone / "name").write_text(f"{name}\n")
            (self._folder / zone / "max_energy_range_uj").write_text(f"{self.RANGE}\n")
        (self._folder / "intel-rapl").mkdir()
        self.use(0)

    def use(self, microjoules: int) -> None:
        """Add microjoules to the package, and a tenth of them to memory."""
        self._microjoules += microjoules
        counts = {"intel-rapl:0": self._microjoules, "intel-rapl:0:1": self._microjoules // 10}
        counts |= {"intel-rapl:0:0": 3 * self._microjoules, "intel-rapl:1": 5 * self._microjoules}
        counts["intel-rapl-mmio:0"] = 7 * self._microjoules
        for zone, count in counts.items():
            path = self._folder / zone / "energy_uj"
            # In one step, as the kernel does.
            beside = path.with_suffix(".new")
            beside.write_text(f"{(self._first + count) % self.RANGE}\n")
            beside.replace(path)

    @contextmanager
    def drawing(self, watts: float) -> Iterator[None]:
        """Let the package draw `watts` while the block runs.

        The counters move when they are read, because a thread that moves them would starve on a busy machine.
        """
        read_number, before = rapl._read_number, time.monotonic()

        def read(path: Path) -> int:
            nonlocal before
            now = time.monotonic()
            self.use(int(1e6 * watts * (now - before)))
            before = now
            return read_number(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rapl, "_read_number", read)
            yield


_PYNVML = """
import json, time
from pathlib import Path

STATE = Path(__file__).with_name("state.json")
class NVMLError(Exception):
    pass
_ERRORS = {
    name: type(name, (NVMLError,), {})
    for name in ("NVMLError_NotSupported", "NVMLError_NoPermission", "NVMLError_LibraryNotFound")
}
globals().update(_ERRORS)
def _answer(name):
    found = json.loads(STATE.read_text()).get(name)
    if isinstance(found, str) and found in _ERRORS:
        raise _ERRORS[found](found)
    return found
def nvmlInit():
    _answer("init")
def nvmlShutdown():
    pass
def nvmlDeviceGetCount():
    return _answer("count")
def nvmlDeviceGetHandleByIndex(index):
    return f"GPU-{index}"
def nvmlDeviceGetHandleByUUID(uuid):
    return uuid
def nvmlDeviceGetName(gpu):
    return f"{_answer('name')} {gpu}"
def nvmlDeviceGetTotalEnergyConsumption(gpu):
    return int(_answer("milliwatts_counted") * time.monotonic())
def nvmlDeviceGetPowerUsage(gpu):
    return _answer("milliwatts")
"""


def install_pynvml(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Put a module `pynvml` first on the path, and return the file of its answers. The GPU draws 300 W.

    An answer that is an error's name is raised.
    """
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(_PYNVML)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.syspath_prepend(folder)
    state = folder / "state.json"
    state.write_text('{"count": 1, "name": "NVIDIA H100", "milliwatts_counted": 300000, "milliwatts": 300000}')
    return state
