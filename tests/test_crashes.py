"""Tests that crash or hang fail by name, and all other tests run."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.repository import ROOT

# The code by which each test ends the process of its worker, or never returns.
# `hangs_in_c` holds the interpreter's lock. `hangs_in_system` waits in the kernel and blocks all signals.
ENDINGS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "bus_error": "os.kill(os.getpid(), signal.SIGBUS)",
    "left": "os._exit(0)",
    "hangs_in_c": "re.match('(a+)+$', 'a' * 64 + 'b')",
    "hangs_in_system": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); threading.Event().wait()",
}
FILES, PASSING = 8, 4
CPU_SECONDS = 8


def run_session(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests in `folder` with the options of `make pytest`, but a time limit of 2 seconds a test."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    parallel = next(line.partition(":=")[2].split() for line in lines if line.startswith("PARALLEL :="))
    places = ("-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider", "-p", "xdist")
    options = map(str, (*places, "-o", "faulthandler_timeout=2", *parallel, "-n", "2"))
    # The other session must not have the variables of this worker. It starts faster without plugins.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, env=environment, cwd=folder, preexec_fn=limit_cpu_time
    )


def limit_cpu_time() -> None:
    """Limit the processor time of a process. On a busy core the thread of the time limit may never run."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def test_a_test_that_crashes_or_hangs_fails_and_all_others_run(tmp_path: Path) -> None:
    names = list(ENDINGS)
    for number in range(FILES):
        # Some files run before the first crash, some after the last.
        crashing = names[number - 2 : number - 1] if number >= 2 else []
        lines = ["import os, re, signal, threading", "import pytest"]
        lines += [f"@pytest.mark.parametrize('n', range({PASSING}))", "def test_passes(n): pass"]
        lines += [f"def test_{name}(): {ENDINGS[name]}" for name in crashing]
        lines += ["def test_follows(): pass"]
        (tmp_path / f"test_{number}.py").write_text("\n".join(lines))
    done = run_session(tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    for number, name in enumerate(names, start=2):
        assert f"crashed while running 'test_{number}.py::test_{name}'" in done.stdout
    summary = done.stdout.splitlines()[-1]
    assert f"{len(names)} failed, {FILES * (PASSING + 1)} passed" in summary
    # Hanging tests print their place, unless the limit of CPU time came first.
    assert "Timeout (0:00:02)!" in done.stderr
    assert "in test_hangs_in_system" in done.stderr
