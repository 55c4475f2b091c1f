"""No command writes to the home directory or opens a network socket, in Python or in native code.

Each command is a process with an empty home and no other settings. The kernel kills it at the first network socket
(`without_network.py`). These tests do not find files that are removed again, or files elsewhere.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from support.programs.commands import own_process, without_notes, wrote
from support.programs.repository import ROOT
from support.stand_ins import without_network

pytestmark = pytest.mark.skipif(
    platform.machine() not in without_network.SYSTEM_CALLS, reason="no numbers of this machine's system calls"
)
_PLACES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
_PROBES = {
    "Python": "import socket; socket.socket(socket.{family})",
    "native code": "import ctypes, socket; ctypes.CDLL(None).socket(int(socket.{family}), 1, 0)",
}


def run_offline(words: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without network, with the home directory `home`."""
    kept = {
        name: os.environ[name] for name in ("PATH", "PYTHONPATH", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ
    }
    places = {name: str(home if name == "HOME" else home / name) for name in _PLACES}
    guarded = [sys.executable, without_network.__file__, *words]
    return subprocess.run(guarded, env={**kept, **places}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK"])
@pytest.mark.parametrize("where", _PROBES)
def test_network_sockets_end_a_process(where: str, family: str, tmp_path: Path) -> None:
    probe = [sys.executable, "-c", _PROBES[where].format(family=family)]
    assert run_offline(probe, tmp_path).returncode < 0
    assert run_offline([sys.executable, "-c", _PROBES[where].format(family="AF_UNIX")], tmp_path).returncode == 0


def test_commands_use_neither_home_nor_network(
    checkpoint: Callable[[str], Path], photo_file: Path, tmp_path: Path
) -> None:
    home, bundle = tmp_path / "home", tmp_path / "bundle"
    home.mkdir()
    task, line = tmp_path / "task.jsonl", {"image": str(photo_file), "question": "What?", "answer": "a cup"}
    task.write_text(json.dumps(line))
    ask = ("--image", photo_file, "--fit", "pad", "--prompt", "What?")
    commands: list[tuple[object, ...]] = [
        ("sinkprune-export", checkpoint("gqa-112"), "-o", bundle, "--budgets", "retain-64"),
        ("sinkprune-run", bundle, *ask, "--budget", "retain-64", "--overlay", tmp_path / "kept.png"),
        ("sinkprune-profile", bundle, *ask, "--repeat", 1, "--new-tokens", 2, "--plot", tmp_path / "profile.png"),
        ("sinkprune-evaluate", bundle, "--data", task, "--json", tmp_path / "accuracy.json"),
        ("sinkprune-build", bundle, "-o", tmp_path / "engines", "--target", "onnxruntime"),
        ("sinkprune-check", bundle, tmp_path / "engines", *ask[:2], "--fit", "pad"),
        ("sinkprune-run", bundle, *ask, "--budget", "retain-64", "--backend", "openvino"),
        ("sinkprune-doctor", bundle),
    ]
    for command, *arguments in commands:
        done = run_offline(own_process(str(command), *arguments), home)
        named = [file for option, file in pairwise(arguments) if option in ("--overlay", "--plot", "--json")]
        assert (done.returncode, without_notes(done.stderr)) == (0, wrote(*named)), command
        assert list(home.rglob("*")) == [], command


def test_openvino_is_imported_without_its_reports(tmp_path: Path) -> None:
    """By default openvino writes an identifier and contacts its vendor, after the first second."""
    program = (
        "import sys; from sinkprune.runtime.backends.openvino.backend import import_openvino; "
        "library = import_openvino('x'); "
        "sys.exit(any('telemetry' in name for name in sys.modules) or not library.Core().available_devices)"
    )
    done = run_offline([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []


def test_a_home_that_cannot_be_written_is_no_error(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    question = ("--image", photo_file, "--fit", "pad", "--prompt", "What?", "--budgets", "retain-64")
    options = ("--repeat", 1, "--new-tokens", 2, "--plot", tmp_path / "profile.png")
    # Not even root can make a folder in /proc.
    done = run_offline(
        own_process("sinkprune-profile", bundle("gqa-112"), *question, *options), Path("/proc/nowhere")
    )
    assert done.returncode == 0 and "Matplotlib" not in done.stderr
    assert (tmp_path / "profile.png").stat().st_size


def test_the_environment_cannot_enable_telemetry(tmp_path: Path) -> None:
    program = (
        "import os; os.environ['ORT_DISABLE_TELEMETRY'] = '0'; "
        "from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime; import_onnxruntime('ort-cpu')"
    )
    assert run_offline([sys.executable, "-c", program], tmp_path).returncode == 0
    assert list(tmp_path.rglob("*")) == []


def test_onnxruntime_is_imported_in_one_place() -> None:
    # This module disables telemetry before the import.
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = [path for path in files if re.search(r"(import|from) onnxruntime\b", path.read_text(encoding="utf-8"))]
    assert [path.relative_to(ROOT / "src/sinkprune") for path in found] == [
        Path("runtime/backends/onnxruntime/library.py")
    ]
