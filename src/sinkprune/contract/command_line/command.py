"""Starts a command: its verb, its errors and exit codes, and Ctrl-C.

0: done. 2: wrong input; one message on stderr. 1: our bug, with its traceback. 130: interrupted. This module imports
little, because an interrupt before `start` runs ends in a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from types import FrameType

from sinkprune.contract.checks import escaped
from sinkprune.contract.errors import CostsWarning, PictureWarning, SinkpruneError, UnitsWarning, UnusualStateWarning

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command in order: Ctrl-C, the end of a service or a container, and that of a terminal."""
_CLEAN_UP_S = 3.0
"""How long a clean-up may take before another Ctrl-C stops it."""


@contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on all `INTERRUPTS`, so that half-written files are removed and results kept.

    An interrupt that a library turns into another error stays an interrupt. One that Python drops, as in `__del__`,
    is repeated.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    present = signal.getsignal(signal.SIGTERM)
    # `start` runs a command within its own block.
    handler = present if isinstance(present, _Interrupts) else _Interrupts()

    def on_dropped(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            handler.interrupted_at = None
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            hook(dropped)

    # Background jobs of a shell ignore Ctrl-C, and those of nohup the end of the terminal.
    numbers = [
        number for number in INTERRUPTS if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]
    hook, sys.unraisablehook = sys.unraisablehook, on_dropped
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    except Exception as error:
        if handler.interrupted_at is not None:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = hook
        for number, former in earlier.items():
            signal.signal(number, former)


class _Interrupts:
    """Raises KeyboardInterrupt at each of `INTERRUPTS`, and ignores those that follow within `_CLEAN_UP_S`."""

    def __init__(self) -> None:
        self.interrupted_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        # A second Ctrl-C would stop the clean-up of the first. Later ones stop what still runs.
        if self.interrupted_at is not None and now - self.interrupted_at < _CLEAN_UP_S:
            return
        self.interrupted_at = now
        raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Drop what is printed from now on to a terminal that has ended: there, each write would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


INTERRUPTED = 130

# What users can mend, by the system's errors.
_REMEDIES = {
    **dict.fromkeys(
        ("ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EIO", "ENAMETOOLONG"),
        "Free space, or choose a place you may read and write.",
    ),
    "ENOMEM": "End other programs, raise the limit that is set (ulimit -v), or use a machine with more memory.",
    **dict.fromkeys(("EMFILE", "ENFILE"), "Raise the limit that is set (ulimit -n), or end other programs."),
}


def start(module: str, *words: str) -> int:
    """Run `main` of a command's `module` with `words` and then the command line, and return the exit code.

    The module is imported here, so that an interrupt during the import is no traceback.
    """
    _open_closed_streams()
    code = 0

    def main(arguments: Sequence[str] | None) -> None:
        nonlocal code
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
        _write_to_stderr(f"interrupted; {escaped(str(interrupt) or 'nothing half-written was left.')}\n")
        return INTERRUPTED
    except Exception as error:
        message = _message_for_user(error)
        if message is None:
            raise
        _write_to_stderr(f"error: {escaped(message)}\n")
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


def _write_to_stderr(line: str) -> None:
    with suppress(OSError):
        sys.stderr.write(line)


def _message_for_user(error: Exception) -> str | None:
    """Return the message for an error that the user can mend; None for a bug."""
    if isinstance(error, SinkpruneError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()  # noqa: PTH109 -- pathlib is not loaded yet
        except FileNotFoundError:
            return "the current folder was removed. Change to a folder that exists, and run the command again."
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {error}".removesuffix(": "))
    if isinstance(error, OSError) and (remedy := _REMEDIES.get(errno.errorcode.get(error.errno or 0, ""))):
        place = f" '{error.filename}'" if error.filename else ""
        return f"the system refused{place}: {error.strerror}. {remedy}"
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
