"""The end of a terminal or of an ssh session ends a command as Ctrl-C does."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from sinkprune.contract.child_processes import python_command
from sinkprune.contract.command_line.command import INTERRUPTED, run_command

# A command that prints until it is interrupted, and then keeps what it has.
_PROGRAM = """
import sys, time
from pathlib import Path
from sinkprune.contract.command_line.command import run_command

def body(arguments):
    try:
        for number in range(600):
            print("working", flush=True)
            time.sleep(0.05)
    except KeyboardInterrupt:
        print("the report")
        sys.stderr.write("wrote it\\n")
        Path(sys.argv[1]).write_text("kept")
        raise

sys.exit(run_command(body, None))
"""


def test_what_a_command_has_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    words = python_command(_PROGRAM, str(kept))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=_take_terminal
    ) as process:
        os.close(theirs)
        assert os.read(ours, 7) == b"working"
        os.close(ours)
        assert process.wait(timeout=30) == INTERRUPTED
    assert kept.read_text() == "kept"


def _take_terminal() -> None:
    """Make standard input the terminal of this session. When it ends, the system sends SIGHUP."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_command_of_nohup_goes_on() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_command(lambda arguments: signal.raise_signal(signal.SIGHUP), []) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_handlers_come_back(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    assert run_command(lambda arguments: signal.raise_signal(number), []) == INTERRUPTED
    assert signal.getsignal(number) is before
    # Files and pipes are still there, and are written to.
    assert capfd.readouterr().err == "interrupted; nothing half-written was left.\n"
