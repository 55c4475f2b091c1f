"""How every command starts and ends: interrupts, the end of a terminal, unwritable streams, too little memory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.child_processes import python_command
from sinkprune.contract.command_line.command import INTERRUPTED, run_command
from support.programs.commands import own_process

Bundles = Callable[..., Path]
# What Python prints where the command has not begun.
_BEFORE_THE_COMMAND = (
    'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nKeyboardInterrupt\n'
)
# Seconds behind Python's own start, in which it answers Ctrl-C in its own way.
_MOMENTS = [0.01, 0.02, 0.04, 0.06, 0.09, 0.12, 0.15, 0.19, 0.23, 0.3, 0.4, 0.6]


@pytest.fixture
def asked(bundle: Bundles, photo_file: Path) -> list[str]:
    """`sinkprune-run` with a question, to be run in a process of its own."""
    small, question = bundle("gqa-112"), ("--prompt", "What?", "--max-new-tokens", 2)
    return own_process("sinkprune-run", small, "--image", photo_file, *question)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("sinkprune-run", signal.SIGINT),
        pytest.param("sinkprune-run", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("sinkprune-export", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_moment_is_no_traceback(
    command: str, number: signal.Signals, asked: list[str], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    export = own_process("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "bundle")
    codes, words = [], asked if command == "sinkprune-run" else export
    words[2] = words[2].replace("sys.exit", "sys.stdout.write('!'); sys.stdout.flush(); sys.exit")
    for moment in _MOMENTS:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == "!"
            time.sleep(moment)
            process.send_signal(number)
            _, said = process.communicate(timeout=30)
        if said == _BEFORE_THE_COMMAND:
            # On a busy core the interrupt is there before the program above calls the command.
            continue
        codes.append(process.returncode)
        assert "Traceback" not in said, (moment, said)
        assert process.returncode in (0, INTERRUPTED), (moment, said)
        # A note about the picture may stand before it.
        # In the middle of an answer it has the tokens so far.
        ended = said.endswith(("interrupted; nothing half-written was left.\n", " so far.\n"))
        assert ended == (process.returncode == INTERRUPTED)
        for left in tmp_path.iterdir():
            # An interrupt may be taken only when all is done.
            assert left.name == "bundle"
            read_bundle(left).verify()
            shutil.rmtree(left)
    # A command that is done by then tells nothing of interrupts.
    assert codes.count(INTERRUPTED) >= 4


def test_an_interrupt_that_a_library_makes_an_error_of_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    def body(arguments: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    assert run_command(body, []) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted; nothing half-written was left.\n"


def test_an_interrupt_that_python_drops_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    def body(arguments: object) -> None:
        Dying()
        time.sleep(20)

    began = time.monotonic()
    assert run_command(body, []) == INTERRUPTED
    assert time.monotonic() - began < 10
    assert capfd.readouterr().err == "interrupted; nothing half-written was left.\n"


def test_later_interrupts_do_not_stop_the_clean_up(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = list[str]()

    def body(arguments: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            cleaned.append("all")

    def as_started(arguments: object) -> None:
        assert run_command(body, []) == INTERRUPTED
        assert cleaned == ["all"]
        # The command has printed its last line, and ends.
        signal.raise_signal(signal.SIGINT)

    assert run_command(as_started, []) == 0
    assert capsys.readouterr().err == "interrupted; nothing half-written was left.\n"
    # The next command can be interrupted.
    assert run_command(lambda arguments: signal.raise_signal(signal.SIGINT), []) == INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_handlers_come_back_and_what_was_ignored_stays_ignored(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """As Ctrl-C in background jobs of a shell, and the terminal's end in those of nohup."""
    before = signal.getsignal(number)
    assert run_command(lambda arguments: signal.raise_signal(number), []) == INTERRUPTED
    assert signal.getsignal(number) is before
    # Files and pipes are still there, and are written to.
    assert capfd.readouterr().err == "interrupted; nothing half-written was left.\n"
    if number == signal.SIGTERM:
        return
    signal.signal(number, signal.SIG_IGN)
    try:
        assert run_command(lambda arguments: signal.raise_signal(number), []) == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full", "| true", ">/dev/full 2>/dev/full"]
)
def test_streams_that_take_nothing(streams: str, asked: list[str], tmp_path: Path) -> None:
    done = in_shell([*asked, "--json", str(tmp_path / "answer.json")], streams)
    assert json.loads((tmp_path / "answer.json").read_text())["token_ids"]
    assert done.returncode == (2 if streams.startswith(">/dev/full") else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    if streams == ">/dev/full":
        # A slow machine writes lines of progress before it.
        said = "error: the system refused 'standard output': No space left on device"
        assert done.stderr.splitlines()[-1].startswith(said)
        for word in ("--help", "--version"):
            done = in_shell(own_process("sinkprune-run", word), streams)
            assert done.returncode == 2 and done.stderr.startswith(said)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", r"\u65e5\xe9\u0434 OK"),
        ("koi8-r:strict", r"\u65e5\xe9д OK"),
        ("shift_jis", r"日\xe9д OK"),
        ("utf-8", "日éд OK"),
    ],
)
def test_characters_that_a_terminal_lacks_are_written_with_backslashes(encoding: str, shown: str) -> None:
    program = """
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.table_console import TableConsole

def body(arguments):
    print("日éд OK")
    TableConsole().print("日éд OK")
    raise PermissionError(13, "日éд OK", "日éд OK")

sys.exit(run_command(body, []))
"""
    variables = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", f"import sys\n{program}"], capture_output=True, env=variables)
    codec = encoding.partition(":")[0]
    assert done.stdout.decode(codec) == f"{shown}\n{shown}\n", done.stderr
    assert done.stderr.decode(codec).startswith(f"error: the system refused '{shown}': {shown}.")
    assert done.returncode == 2


def test_nothing_is_printed_into_files_that_got_the_numbers_of_closed_streams(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    export = own_process(
        "sinkprune-export", checkpoint("gqa-112"), "--budgets", "retain-64", "-o", tmp_path / "bundle"
    )
    assert in_shell(export, ">&- 2>&- <&-").returncode == 0
    question = ("--image", "x.png", "--prompt", "What?")
    # The sums hold, and the picture is what is refused.
    asked = in_shell(own_process("sinkprune-run", tmp_path / "bundle", *question), "")
    assert (asked.returncode, "x.png" in asked.stderr) == (2, True)


def in_shell(words: list[str], streams: str) -> subprocess.CompletedProcess[str]:
    """The command with its streams as the shell makes them; the code is the command's, not that of a pipe's end."""
    script = f'unset PYTHONUNBUFFERED; set -o pipefail; "$@" {streams}'
    return subprocess.run(["bash", "-c", script, "bash", *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("error", "few"),
    [
        (MemoryError("Unable to allocate 8 GiB"), "memory: Unable to allocate 8 GiB. End other"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a"), "'a': Too many open files. Raise the limit"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a"), "'a': No space left on device. Free space"),
    ],
    ids=str,
)
def test_shortages_are_reported(error: Exception, few: str, capsys: pytest.CaptureFixture[str]) -> None:
    def body(arguments: object) -> None:
        raise error

    assert run_command(body, []) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the system refused") and few in said
    assert said.count("\n") == 1


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda arguments: setattr(arguments, "x", 1 // 0), [])


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
