"""What every command does alike: run, and turn errors into exit codes.

0: done. 2: the user can mend it; one message on stderr, no traceback. 1: our bug, with its traceback.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.terminal import escaped

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


def run_command(body: Callable[[Sequence[str] | None], None], arguments: Sequence[str] | None) -> int:
    """Run a command's body and return its exit code."""
    try:
        with _termination_as_interrupt():
            body(arguments)
    except SinkpruneError as error:
        return _say(str(error))
    except BrokenPipeError:
        # The reader of our output went away, as `head` does; that is no error.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        place = f" '{error.filename}'" if error.filename else ""
        return _say(
            f"the system refused{place}: {error.strerror}. Free space, or choose a place you may read and write."
        )
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing half-written was left.\n")
        return INTERRUPTED
    return 0


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds the stack like Ctrl-C, so that what is half-written gets removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _say(message: str) -> int:
    sys.stderr.write(f"error: {escaped(message)}\n")
    return 2
