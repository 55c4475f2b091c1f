"""What every command does alike: start, run, and turn errors into exit codes.

0: done. 2: the user can mend it; one message on stderr, no traceback. 1: our bug, with its traceback.
130: interrupted. It imports next to nothing: until `start` runs, an interrupt would end in a traceback.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import ExtensionFileLoader
from types import FrameType

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.errors import SinkpruneError

INTERRUPTED = 130

# What the operating system says when the disk, not the program, is at fault.
_DISK_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.ENAMETOOLONG,
}
# What Python, the dynamic linker, ONNX Runtime, OpenVINO and oneTBB say where there is no thread, or no memory. The
# system calls both a lack of resources.
_THREAD_WORDS = (
    "can't start new thread",
    "pthread_create failed",
    "Resource temporarily unavailable",
    "thread creation failed",
)
_MEMORY_WORDS = (
    "failed to map segment",
    "Cannot allocate memory",
    "bad_alloc",
    "bad allocation",
    "Failed to allocate memory",
)
_SHOWN = 160
# A compiled module's own code runs as it is made, or then.
_LOADING = ("create_module", "exec_module")


def start(module: str, *words: str) -> int:
    """Run `main` of a command's `module` as this process's own work, with `words` before those of the command line;
    returns the exit code.

    The module is imported here, so that Ctrl-C meanwhile is told from a bug too. Closed standard streams are opened
    on nothing: else the next files would get their numbers, and what libraries print would stand in them.
    """
    _open_closed_streams()
    code = 0

    def main(arguments: Sequence[str] | None) -> None:
        nonlocal code
        code = import_module(module).main([*words, *sys.argv[1:]])
        # Its own `run_command` has told of it.
        _drop_what_nobody_takes()

    try:
        return run_command(main, None) or code
    finally:
        # All is done but Python's own leave-taking, whose errors would be tracebacks and exit codes of other meaning.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _drop_what_nobody_takes()


def run_command(body: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None) -> int:
    """Run a command's body and return its exit code."""
    try:
        with _signals_as_interrupts():
            body(arguments)
            # What cannot be printed is an error now, not when Python ends.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; that is no error.
        return 0
    except KeyboardInterrupt:
        with suppress(OSError):
            sys.stderr.write("interrupted; nothing half-written was left.\n")
        return INTERRUPTED
    except Exception as error:
        message = _message_for_user(error)
        if message is None:
            raise
        # Where stderr takes nothing, the exit code alone must tell.
        with suppress(OSError):
            sys.stderr.write(f"error: {escaped(message)}\n")
        return 2
    return 0


def _message_for_user(error: Exception) -> str | None:
    """What to tell of an error that the user can mend; None for others."""
    if isinstance(error, FileNotFoundError) and _current_folder_is_gone():
        return "the current folder was removed. Change to a folder that exists, and run the command again."
    shortage = _shortage(error)
    if shortage is not None:
        return shortage
    if isinstance(error, SinkpruneError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        place = f" '{error.filename}'" if error.filename else ""
        return f"the system refused{place}: {error.strerror}. Free space, or choose a place you may read and write."
    return None


def _shortage(error: BaseException | None) -> str | None:
    """What to tell where memory, address space or threads ran out, by an error or by one that it was made of."""
    while error is not None:
        # Ours quote what users wrote.
        text = "" if isinstance(error, SinkpruneError) else str(error)
        if any(word in text for word in _THREAD_WORDS):
            return (
                f"there are too few threads: {_last_line(error)}. End other programs, raise the limit that is set "
                "(ulimit -u or -v, or TasksMax of a systemd unit), or give --threads a smaller number."
            )
        lacks_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if lacks_memory or any(word in text for word in _MEMORY_WORDS):
            return (
                f"there is too little memory: {_last_line(error)}. End other programs, raise the limit that is set "
                "(ulimit -v), or use a machine with more."
            )
        error = error.__cause__
    return None


def _current_folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 -- pathlib is not loaded yet
    except FileNotFoundError:
        return True
    return False


def _last_line(error: BaseException) -> str:
    """The end of what an error says, where libraries say what it is about; its name if it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".")[-_SHOWN:] if lines else type(error).__name__


def _loads_extension(frame: FrameType | None) -> bool:
    """Whether a compiled module is being imported where `frame` is."""
    while frame is not None:
        if frame.f_code.co_name in _LOADING and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that what is half-written gets removed.

    Libraries may turn an interrupt into an error of their own; it stays an interrupt. Where Python drops it, as in a
    callback of its own, it comes again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if _loads_extension(frame):
            # Where C++ calls Python as it is loaded, an exception may end the process.
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        came = True
        raise KeyboardInterrupt

    def again(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            hook(dropped)

    hook, sys.unraisablehook = sys.unraisablehook, again
    previous = {signal.SIGTERM: signal.signal(signal.SIGTERM, interrupt)}
    # A shell's background jobs ignore Ctrl-C, and so do we then.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = hook
        for number, handler in previous.items():
            signal.signal(number, handler)


def _open_closed_streams() -> None:
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given: all below are open already.
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _drop_what_nobody_takes() -> None:
    """Let Python end in peace where a standard stream refuses what is still to be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
