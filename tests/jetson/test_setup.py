"""`jetson/setup.sh` on scratch roots of both JetPacks: its changes, a second run, and what a failure leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sinkprune.jetson.boards import read_boards
from support.programs.dockerfiles import JETPACK_7, arguments
from support.programs.repository import ROOT
from support.stand_ins.board_trees import agx_orin_jetpack_7_2, changed, orin_nano_jetpack_6_2
from support.stand_ins.setup_stand_ins import SETUP, ScratchBoard, scratch_board

ALL = ("--power-mode", "MAXN_SUPER", "--clocks", "--swap", "8", "--service")
VENV = "/opt/sinkprune/venv"


@pytest.fixture
def board(tmp_path: Path) -> ScratchBoard:
    return board_of("6.2", tmp_path)


def board_of(jetpack: str, folder: Path) -> ScratchBoard:
    tree = {"6.2": orin_nano_jetpack_6_2, "7.2": agx_orin_jetpack_7_2}[jetpack]
    return scratch_board(tree(folder / "root"), folder / "programs")


def state(board: ScratchBoard) -> dict[str, str]:
    """Return the files that a failed set-up must leave unchanged."""
    files = board.files()
    # Only the mode's number counts in the status of nvpmodel. An empty fstab is as good as none.
    files["var/lib/nvpmodel/status"] = files["var/lib/nvpmodel/status"].split()[0]
    # The stored clocks may stay.
    files.pop("var/lib/sinkprune/clocks.before", None)
    return {name: text for name, text in files.items() if text or name != "etc/fstab"}


def shellcheck() -> str | None:
    return shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([str(shellcheck()), str(SETUP)], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("jetpack", "major", "minor", "python"),
    [("6.2", 36, "4.3", "python3.10"), ("6.2", 36, "5.0", "python3.10"), ("7.2", 39, "2.0", "python3.12")],
)
def test_the_environment_is_the_one_of_the_jetpack(
    jetpack: str, major: int, minor: str, python: str, tmp_path: Path
) -> None:
    board = board_of(jetpack, tmp_path)
    changed(board.root, {"etc/nv_tegra_release": f"# R{major} (release), REVISION: {minor}, GCID: 1"})
    before = board.files()
    done = board.setup()
    assert done.returncode == 0, done.stderr
    assert f"JetPack {jetpack}" in done.stdout
    assert board.calls() == [
        f"{python} -I -m venv --system-site-packages {VENV}",
        f"python -I -m pip install --no-input --disable-pip-version-check {ROOT}[cpu,jetpack]",
    ]
    assert (board.root / VENV[1:] / "bin" / "sinkprune-doctor").exists()
    # Nothing else is made.
    made = {name for name in board.files() if name not in before}
    assert made and all(name.startswith("opt/sinkprune/venv/") for name in made)
    assert before.items() <= board.files().items()


def test_every_option_makes_its_change_and_a_second_run_none(board: ScratchBoard) -> None:
    before = board.files()
    done = board.setup(*ALL, "--dry-run")
    assert done.returncode == 0, done.stderr
    for words in ("-m venv", "pip install", "nvpmodel -m 2", "run: jetson_clocks", "fallocate -l 8G", "ctl enable"):
        assert words in done.stdout
    assert done.stdout.endswith("nothing was changed\n")
    assert (board.calls(), board.files()) == ([], before)

    done = board.setup(*ALL)
    assert done.returncode == 0, done.stderr
    assert board.calls()[2:] == [
        "nvpmodel -m 2",
        "jetson_clocks --store /var/lib/sinkprune/clocks.before",
        "jetson_clocks ",
        "fallocate -l 8G -- /swapfile-sinkprune",
        "mkswap -- /swapfile-sinkprune",
        "swapon -- /swapfile-sinkprune",
        "systemctl daemon-reload",
        "systemctl enable sinkprune-doctor.service",
    ]
    files = board.files()
    assert files["etc/fstab"] == "/swapfile-sinkprune none swap sw 0 0\n"
    assert (board.root / "swapfile-sinkprune").stat().st_mode & 0o777 == 0o600
    unit = files["etc/systemd/system/sinkprune-doctor.service"]
    assert f"ExecStart={VENV}/bin/sinkprune-doctor --json\n" in unit
    assert f"ExecStartPre={board.programs}/jetson_clocks\n" in unit
    assert "@" not in unit
    assert "var/lib/sinkprune/setup.undo" not in files

    done = board.setup(*ALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as it should be") == 4
    assert all(call.startswith("jetson_clocks") for call in board.calls())
    assert board.files() == files


@pytest.mark.parametrize(
    ("fails", "jetpack"),
    [
        *((program, "6.2") for program in ("python", "nvpmodel", "jetson_clocks", "fallocate", "mkswap", "swapon")),
        *((program, "7.2") for program in ("systemctl", "half-enabled")),
    ],
)
def test_a_failure_is_undone(fails: str, jetpack: str, tmp_path: Path) -> None:
    board = board_of(jetpack, tmp_path)
    before = state(board)
    mode = {"6.2": "MAXN_SUPER", "7.2": "MODE_30W"}[jetpack]
    done = board.setup("--power-mode", mode, "--clocks", "--swap", "8", "--service", fails=fails)
    assert done.returncode == 1
    assert "undoing what was begun" in done.stderr
    assert state(board) == before
    assert board.setup("--power-mode", mode, "--swap", "8", "--service").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_set_up_whose_successor_fails_or_is_killed_is_put_back(number: int, board: ScratchBoard) -> None:
    assert board.setup().returncode == 0
    before = board.files()
    assert board.setup("--source", str(SETUP.parent), fails="python").returncode == 1
    assert board.files() == before
    running = board.begin("--source", str(SETUP.parent), "--swap", "8", hangs="mkswap")
    until = time.monotonic() + 30
    while not board.hangs():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(running.pid, number)
    assert running.wait(30) != 0
    if number == signal.SIGKILL:
        # Only the next run can undo the changes, and a dry run does not.
        assert f"{SETUP.parent.resolve()}[" in board.files()["opt/sinkprune/venv/sinkprune-setup"]
        assert board.setup("--dry-run").returncode == 0
        assert f"{SETUP.parent.resolve()}[" in board.files()["opt/sinkprune/venv/sinkprune-setup"]
        done = board.setup()
        assert "a former set-up was cut off: undoing it" in done.stdout
        assert "environment: as it should be" in done.stdout
    assert board.files() == before


@pytest.mark.parametrize(
    ("files", "options", "environment", "message"),
    [
        ({"proc/device-tree/compatible": None}, (), {}, "this is no Jetson"),
        ({"proc/device-tree/compatible": "nvidia,p2888\0acme,x\0"}, (), {}, "is not known: nvidia,p2888 acme,x"),
        ({"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1"}, (), {}, "'35.4.1' (ROOT/etc/nv_tegra_release)"),
        ({"etc/nv_tegra_release": "nonsense"}, (), {}, "Jetson Linux '0.0.0'"),
        ({}, (), {"lacks": "ensurepip"}, "apt-get install python3.10-venv"),
        ({}, (), {"lacks": "tensorrt"}, "apt-get install nvidia-jetpack"),
        ({}, (), {"free": "2999"}, "2999 MB are free"),
        ({}, ("--power-mode", "TURBO"), {}, "'TURBO' is none of: 15W 25W MAXN_SUPER 7W"),
        ({}, ("--swap", "none"), {}, "--swap is 'none', expected GB"),
        ({}, ("--venv", "here"), {}, "expected a path that begins with /"),
        ({}, ("--venv", "/etc"), {}, "no environment"),
        ({}, ("--source", "sinkprune"), {}, "--source is 'sinkprune', which is not there"),
        ({}, ("--turbo",), {}, "unknown option '--turbo'"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_a_board_or_an_option_that_does_not_fit_is_rejected_before_any_change(
    files: dict[str, str | None],
    options: tuple[str, ...],
    environment: dict[str, str],
    message: str,
    board: ScratchBoard,
) -> None:
    changed(board.root, files)
    before = board.files()
    done = board.setup(*options, **environment)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message.replace("ROOT", str(board.root)) in done.stderr
    assert board.calls() == []
    assert board.files() == before


def test_nothing_of_the_current_folder_is_run_and_nothing_is_installed_by_name(
    board: ScratchBoard, tmp_path: Path
) -> None:
    here, environment = tmp_path / "here", board.environment_of({})
    here.mkdir()
    # Outside of a checkout
    for name in ("setup.sh", "boards.json"):
        shutil.copy(SETUP.parent / name, here / name)
    words = [str(here / "setup.sh"), *board.words()[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "no checkout around this script" in done.stderr, done
    assert board.calls() == []
    for name in ("tr", "df", "dirname", "python3.10"):
        (here / name).write_text(f"#!/bin/sh\ntouch '{tmp_path}/stolen'\n")
        (here / name).chmod(0o755)
    for path in (":", ".:"):
        own = {**environment, "PATH": path + environment["PATH"]}
        done = subprocess.run(board.words(), cwd=here, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "stolen").exists()
    # Python's own -I keeps modules of the current folder out.
    assert all(" -I " in line for line in board.calls() if line.startswith("python"))


def test_the_extra_follows_the_cuda_of_each_jetpack() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [requirements] = re.findall(r"^jetpack = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    found = [Requirement(text) for text in re.findall(r'"(.*?)"', requirements) if "cuda-python" in text]
    for jetpack in (known for known in read_boards().jetpacks if known.version in ("6.2", "7.2")):
        [cuda] = [each for each in found if each.marker and each.marker.evaluate({"python_version": jetpack.python})]
        major = jetpack.cuda.split(".")[0]
        assert cuda.specifier.contains(f"{major}.9") and not cuda.specifier.contains(f"{int(major) + 1}.0")
    assert jetpack.version == "7.2"
    assert arguments(JETPACK_7)["TENSORRT"].startswith(f"{jetpack.tensorrt}.")
    assert f":{jetpack.cuda}." in arguments(JETPACK_7)["BASE"]
