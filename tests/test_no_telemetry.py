"""A whole run leaves nothing in the home directory and opens no socket to a network, in native code neither.

Each command is a process with an empty home and no other settings, which the kernel ends at the first such socket
(`without_network.py`). What this does not see: files that are written and removed again, and files elsewhere.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.programs.commands import own_process
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


def alone(words: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without network, with an empty home of its own."""
    kept = {
        name: os.environ[name] for name in ("PATH", "PYTHONPATH", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ
    }
    places = {name: str(home if name == "HOME" else home / name) for name in _PLACES}
    guarded = [sys.executable, without_network.__file__, *words]
    return subprocess.run(guarded, env={**kept, **places}, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK"])
@pytest.mark.parametrize("where", _PROBES)
def test_sockets_are_noticed(where: str, family: str, tmp_path: Path) -> None:
    probe = [sys.executable, "-c", _PROBES[where].format(family=family)]
    assert alone(probe, tmp_path).returncode < 0
    assert alone([sys.executable, "-c", _PROBES[where].format(family="AF_UNIX")], tmp_path).returncode == 0


def test_a_whole_run_touches_neither_home_nor_network(
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
        ("sinkprune-evaluate", bundle, "--task", task, "--json", tmp_path / "accuracy.json"),
        ("sinkprune-build", bundle, "-o", tmp_path / "engines", "--target", "onnxruntime"),
        ("sinkprune-check", bundle, tmp_path / "engines", *ask[:2]),
        ("sinkprune-run", bundle, *ask, "--budget", "retain-64", "--backend", "openvino"),
        ("sinkprune-doctor", bundle),
    ]
    for command, *arguments in commands:
        done = alone(own_process(str(command), *arguments), home)
        # Lines of progress come on a busy machine.
        others = [line for line in done.stderr.splitlines() if not re.search(r": \d+ s$| in \d+ s, ", line)]
        assert (done.returncode, others) == (0, []), command
        assert list(home.rglob("*")) == [], command


def test_openvino_is_imported_without_its_reports(tmp_path: Path) -> None:
    """By itself it writes an identifier and tells its vendor, if not in the first second."""
    program = (
        "import sys; from sinkprune.runtime.backends.openvino.library import import_openvino; "
        "library = import_openvino('x'); "
        "sys.exit(any('telemetry' in name for name in sys.modules) or not library.Core().available_devices)"
    )
    done = alone([sys.executable, "-c", program], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []


def test_a_home_that_cannot_be_written_is_none_of_our_business(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path
) -> None:
    # There not even root can make a folder.
    arguments = (
        bundle("gqa-112"),
        "--image",
        photo_file,
        "--fit",
        "pad",
        "--prompt",
        "What?",
        "--budgets",
        "retain-64",
    )
    options = ("--repeat", 1, "--new-tokens", 2, "--plot", tmp_path / "profile.png")
    done = alone(own_process("sinkprune-profile", *arguments, *options), Path("/proc/nowhere"))
    assert done.returncode == 0 and "Matplotlib" not in done.stderr
    assert (tmp_path / "profile.png").stat().st_size


def test_what_the_environment_says_of_telemetry_counts_for_nothing(tmp_path: Path) -> None:
    program = (
        "import os; os.environ['ORT_DISABLE_TELEMETRY'] = '0'; "
        "from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime; import_onnxruntime('ort-cpu')"
    )
    assert alone([sys.executable, "-c", program], tmp_path).returncode == 0
    assert list(tmp_path.rglob("*")) == []


def test_onnxruntime_is_imported_in_one_place() -> None:
    # There its telemetry is switched off first.
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = [path for path in files if re.search(r"(import|from) onnxruntime\b", path.read_text(encoding="utf-8"))]
    assert [path.relative_to(ROOT / "src/sinkprune") for path in found] == [
        Path("runtime/backends/onnxruntime/library.py")
    ]
