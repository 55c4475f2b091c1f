"""What a machine is, read from recorded trees of its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinkprune.jetson.boards import read_boards
from sinkprune.jetson.host import ClockFrequency, Machine, SystemFiles, read_machine, this_environment
from support.stand_ins.board_trees import PYTHON_OF_JETPACK_6, agx_orin_jetpack_7_2, changed, orin_nano_jetpack_6_2

MAXN = "< POWER_MODEL ID=0 NAME=MAXN >\n"


def machine(root: Path) -> Machine:
    return read_machine(SystemFiles(root), PYTHON_OF_JETPACK_6, read_boards(), root)


def test_an_orin_nano_with_jetpack_6_2(tmp_path: Path) -> None:
    found = machine(orin_nano_jetpack_6_2(tmp_path))
    assert found.model == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert (found.board, found.chip) == ("orin-nano-8gb", "Jetson Orin")
    assert (found.system, found.kernel) == ("Ubuntu 22.04.5 LTS", "5.15.148-tegra")
    installed = found.jetpack
    assert (installed.l4t, installed.package, installed.cuda) == ("36.4.3", "6.2+b77", "12.6.68")
    assert (installed.tensorrt, installed.tensorrt_python) == ("10.3.0.30", ("3.10",))
    assert found.gpu_clock == ClockFrequency(306, 306, 1020, "nvhost_podgov")
    assert found.cpu_clock == ClockFrequency(730, 730, 1728, "schedutil")
    assert found.memory_bytes == 7620 << 20
    assert found.free_bytes is not None and found.free_bytes <= 6400 << 20
    assert [(swap.place, swap.compressed) for swap in found.swap] == [("/dev/zram0", True)]
    assert (found.instructions, found.unreadable) == ("asimddp asimdhp fphp", ())


def test_an_agx_orin_with_jetpack_7_2(tmp_path: Path) -> None:
    found = machine(agx_orin_jetpack_7_2(tmp_path))
    installed = found.jetpack
    assert (found.board, installed.l4t, installed.cuda) == ("agx-orin-64gb", "39.2.0", "13.2.0")
    # Debian has one folder for all versions, so /usr/bin/python3 decides.
    assert (installed.tensorrt, installed.tensorrt_python) == ("10.16.2.10", ("3.12",))
    swaps = [(swap.place, swap.compressed, swap.bytes) for swap in found.swap]
    assert swaps == [("/swapfile", False, 8388604 * 1024)]


@pytest.mark.parametrize(
    ("files", "number", "name", "fastest"),
    [
        ({}, 0, "15W", "MAXN_SUPER"),
        ({"var/lib/nvpmodel/status": "pmode:0002"}, 2, "MAXN_SUPER", "MAXN_SUPER"),
        ({"var/lib/nvpmodel/status": "pmode:0009"}, 9, None, "MAXN_SUPER"),
        # Never set: the default of the configuration.
        ({"var/lib/nvpmodel/status": None}, 1, "25W", "MAXN_SUPER"),
        ({"etc/nvpmodel.conf": None}, 0, None, None),
        ({"etc/nvpmodel.conf": MAXN}, 0, "MAXN", "MAXN"),
        ({"etc/nvpmodel.conf": f"{MAXN}< POWER_MODEL ID=4 NAME=MAXN_SUPER >\n"}, 0, "MAXN", "MAXN_SUPER"),
    ],
)
def test_power_modes(
    files: dict[str, str | None], number: int, name: str | None, fastest: str | None, tmp_path: Path
) -> None:
    found = machine(changed(orin_nano_jetpack_6_2(tmp_path), files)).power_mode
    assert found is not None
    assert (found.id, found.name, found.fastest and found.fastest[0]) == (number, name, fastest)
    assert found.is_fastest == (fastest in (None, name))


def test_malformed_files_are_ignored_and_those_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    root = orin_nano_jetpack_6_2(tmp_path)
    malformed: dict[str, str | None] = {
        "usr/local/cuda/version.json": '{"cuda": "12"}',
        "var/lib/dpkg/status": "Package\nVersion:\n\n\n",
        "proc/meminfo": "MemTotal: much\n",
        "proc/swaps": "x\ny z\n/dev/x partition lots 0 0\n",
        "etc/nvpmodel.conf": "< POWER_MODEL NAME=15W >",
        "proc/device-tree/compatible": "\0\0",
    }
    found = machine(changed(root, malformed))
    assert (found.unreadable, found.board, found.memory_bytes, found.swap) == ((), None, None, ())
    root = orin_nano_jetpack_6_2(tmp_path / "other")
    status = root / "var/lib/nvpmodel/status"
    status.unlink()
    # Root can read all files, but nobody can read a folder as a file.
    status.mkdir()
    found = machine(root)
    assert found.power_mode is None
    assert found.unreadable == ("/var/lib/nvpmodel/status: Is a directory",)


def test_libraries_are_imported_as_a_test(tmp_path: Path) -> None:
    found = this_environment()
    assert found.imports("onnxruntime")
    assert found.minor == ".".join(map(str, sys.version_info[:2]))
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.10: cannot open shared object file')\n")
    (tmp_path / "pycuda.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    program = "import json, sys; from sinkprune.contract.checks import to_json;"
    program += "from sinkprune.jetson.host import this_environment as f; print(json.dumps(to_json(f())))"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert '"error": "ImportError: libnvinfer.so.10: cannot open shared object file"' in done.stdout, done.stderr
    assert '"pycuda": {"version": null, "error": "its import ended the process (signal 11)"}' in done.stdout
