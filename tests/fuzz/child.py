"""Makes one call in a forked process, within limits of time and memory, and reports forbidden actions."""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

FILE_BYTES = 2 << 30
"""The largest file that a call may write: a fault must not fill the disk."""
_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.gethostbyname")
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")


@dataclass(frozen=True)
class Call:
    """A call of the function `module:name`, which has a command's arguments and returns its exit code."""

    function: str
    arguments: Sequence[str]
    folder: str
    """The working folder, and the only one that the call may write in."""
    home: str
    """The home folder of the call."""
    seconds: float
    address_space: int | None
    """The limit of address space in bytes; None for no limit."""


def run_here(call: Call, report: int) -> NoReturn:
    """Make the call, write what was seen to the descriptor `report`, and end this process with the exit code."""
    faulthandler.enable()
    # Prints the place of a hang shortly before the process is killed.
    faulthandler.dump_traceback_later(call.seconds * 0.95)
    os.chdir(call.folder)
    os.environ |= {"HOME": call.home, "XDG_CACHE_HOME": call.home, "TMPDIR": call.folder}
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    usual = resource.getrlimit(resource.RLIMIT_AS)
    if call.address_space:
        resource.setrlimit(resource.RLIMIT_AS, (call.address_space, usual[1]))
    module, _, name = call.function.partition(":")
    function = getattr(import_module(module), name)
    sys.addaudithook(_watch(Path(call.folder), report))
    code = _exit_code(function, call.arguments)
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    resource.setrlimit(resource.RLIMIT_AS, usual)
    os.write(report, f"address {_peak_address_space()}\n".encode())
    os._exit(code)


def _exit_code(function: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    try:
        return function(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def _watch(folder: Path, report: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that reports writing outside `folder`, network, programs and code of the input."""
    own, seen = str(folder), set()

    def note(what: str) -> None:
        if what not in seen:
            seen.add(what)
            os.write(report, f"saw {what}\n".encode(errors="replace"))

    def elsewhere(path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        whole = os.path.realpath(os.fsdecode(path))
        return not whole.startswith((own, "/dev/", "/proc/", "/memfd:"))

    def hook(event: str, details: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = details
            writes = any(sign in mode for sign in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
            if writes and elsewhere(path):
                note(f"writing {path!s}")
        elif event in _CHANGES:
            # A relative path may belong to the descriptor of a folder, which the event does not have.
            if str(details[0]).startswith("/") and elsewhere(details[0]):
                note(f"{event} {details[0]!s}")
        elif event in _NETWORK:
            note(f"network {details[1:]!s}")
        elif event in _PROGRAMS:
            note(f"program {details[0]!s}")
        elif event == "exec" and str(getattr(details[0], "co_filename", "")).startswith(own):
            note(f"code of the input {details[0].co_filename}")

    return hook


def _peak_address_space() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmPeak"))
