"""Start a command, run it, and turn its errors into exit codes.

0: done. 2: wrong input; one message on stderr. 1: our bug, with its traceback. 130: interrupted. This module imports
little, because an interrupt before `start` runs ends in a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.interrupts import INTERRUPTS, signals_as_interrupts
from sinkprune.contract.errors import CostsWarning, PictureWarning, SinkpruneError, UnitsWarning, UnusualStateWarning

INTERRUPTED = 130

# Errors of the disk or of permissions, which users can mend.
_DISK_ERRORS = ("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO", "ENAMETOOLONG")
_NO_MEMORY = "Cannot allocate memory"
# What Python, the linker, ONNX Runtime, OpenVINO and oneTBB report where the system has no more, and our message.
_SHORTAGES = {
    "can't start new thread|pthread_create failed|Resource temporarily unavailable|thread creation failed": (
        "there are too few threads: {}. End other programs, raise the limit that is set (ulimit -u or -v, or "
        "TasksMax of a systemd unit), or give --threads a smaller number."
    ),
    f"{_NO_MEMORY}|failed to map segment|bad_alloc|bad allocation|Failed to allocate memory": (
        "there is too little memory: {}. End other programs, raise the limit that is set (ulimit -v), or use a "
        "machine with more."
    ),
    "Too many open files": (
        "no more files can be opened: {}. Raise the limit that is set (ulimit -n), or end other programs."
    ),
    "Failed to write external initializers": (
        "the weights of a graph could not be written: the disk is full, or files may not be so large (ulimit -f). "
        "Free space, or choose another place."
    ),
    "basic_ios::clear: iostream error": (
        "openvino could not write or read the file of a graph: the disk is full, files may not be so large (ulimit "
        "-f), or the file is damaged. Free space, or choose another place."
    ),
}


def start(module: str, *words: str) -> int:
    """Run `main` of a command's `module` with `words` and then the command line, and return the exit code.

    The module is imported here, so that an interrupt during the import is no traceback.
    """
    _open_closed_streams()
    code = 0

    def main(arguments: Sequence[str] | None) -> None:
        nonlocal code
        # Here, because an interrupt before `run_command` ends in a traceback.
        from sinkprune.contract.command_line.progress_lines import starting

        with starting():
            code = import_module(module).main([*words, *sys.argv[1:]])
        # The command has reported output that cannot be written.
        _drop_unwritten_output()

    try:
        return run_command(main, None) or code
    finally:
        # Python's own exit must neither be interrupted nor fail to write.
        for number in INTERRUPTS:
            signal.signal(number, signal.SIG_IGN)
        _drop_unwritten_output()


def entry_point(body: Callable[[Sequence[str] | None], None]) -> Callable[..., int]:
    """Return the entry point `main` of a command's body: it takes the arguments, and returns the exit code."""

    @wraps(body)
    def main(arguments: Sequence[str] | None = None) -> int:
        return run_command(body, arguments)

    return main


def run_command(body: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None) -> int:
    """Run a command's body and return its exit code."""
    # Commands print notes.
    for category in (CostsWarning, PictureWarning, UnitsWarning, UnusualStateWarning):
        warnings.simplefilter("ignore", category)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As on stderr. An answer or a file's name may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals_as_interrupts():
            body(arguments)
            # Output that cannot be written is an error of the command.
            with naming_stdout():
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output ended early, as `head` does.
        return 0
    except KeyboardInterrupt as interrupt:
        _write_last_line(f"interrupted; {escaped(str(interrupt) or 'nothing half-written was left.')}\n")
        return INTERRUPTED
    except Exception as error:
        message = _message_for_user(error)
        if message is None:
            raise
        _write_last_line(f"error: {escaped(message)}\n")
        return 2
    return 0


@contextmanager
def naming_stdout() -> Iterator[None]:
    """Name standard output in an error of the block, which prints: on a full disk the error itself has no name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "standard output"
        raise


def _write_last_line(line: str) -> None:
    """Write the last line of a command to stderr: no line of its start follows."""
    # Without it there are none, and with too many open files it cannot be imported.
    if lines := sys.modules.get("sinkprune.contract.command_line.progress_lines"):
        lines.end_start_lines()
    with suppress(OSError):
        sys.stderr.write(line)


def _message_for_user(error: Exception) -> str | None:
    """Return the message for an error that the user can mend; None for a bug."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()  # noqa: PTH109 -- pathlib is not loaded yet
        except FileNotFoundError:
            return "the current folder was removed. Change to a folder that exists, and run the command again."
    if shortage := _shortage(error):
        return shortage
    if isinstance(error, SinkpruneError):
        return str(error)
    if isinstance(error, OSError) and errno.errorcode.get(error.errno or 0) in _DISK_ERRORS:
        place = f" '{error.filename}'" if error.filename else ""
        return f"the system refused{place}: {error.strerror}. Free space, or choose a place you may read and write."
    return None


def _shortage(error: BaseException | None) -> str | None:
    """Return the message if `error`, or an error that caused it, is a lack of memory, threads or open files."""
    while error is not None:
        # Our own messages quote the user's text.
        text = "" if isinstance(error, SinkpruneError) else str(error)
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            text += _NO_MEMORY
        for words, message in _SHORTAGES.items():
            if re.search(words, text):
                # Libraries write the cause last.
                last = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
                return message.format(last.rstrip(".")[-160:])
        error = error.__cause__
    return None


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null: otherwise files get their numbers, and libraries print into them."""
    # The system returns the lowest free number.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
    os.close(number)


def _drop_unwritten_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
