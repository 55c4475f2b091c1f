"""A process that imports everything, forks for each call that it reads from stdin, and prints the outcome as JSON.

Forks allow tens of calls a second, because imports take longer than most calls. This process computes nothing before
a fork: the threads of engine libraries do not exist in the child. The child makes one call within limits of time and
memory, and reports forbidden actions. `Worker` starts such a process, sends it calls and reads the outcomes.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

MEMORY_BYTES = 1 << 30
"""How much more memory than the honest input an input may take."""
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


_CONFIGURATIONS = ("clip", "llama", "llava", "llava_next", "mistral", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MODULES = (
    "PIL.Image",
    "av",
    "tokenizers",
    *(f"transformers.models.{kind}.configuration_{kind}" for kind in _CONFIGURATIONS),
    "sinkprune.engines.build",
    "sinkprune.engines.command",
    "sinkprune.export.bundle_writer",
    "sinkprune.export.command",
    "sinkprune.runtime.commands.run",
)
_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """The result of a call."""

    code: int
    """The exit code; negative for the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool
    peak_bytes: int
    """The peak of resident memory, with the worker's own modules."""
    address_space: int | None
    """The peak of address space in bytes; None if the call did not return."""
    seen: tuple[str, ...]
    """Forbidden actions: writing elsewhere, network, programs, code of the input."""

    @property
    def answer(self) -> Any:
        """The answer of a command, without times; None if it printed no JSON."""
        try:
            answer = json.loads(self.stdout)
        except ValueError:
            return None
        return {key: answer.get(key) for key in ("token_ids", "text", "tokens_per_layer")}


class Worker:
    """A process that makes one call at a time, each in a new fork; a context manager that ends it."""

    def __init__(self, modules: tuple[str, ...] = MODULES) -> None:
        search = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        # One thread each: workers share the cores, and libraries' pools would not outlive a fork.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.worker", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # transformers reads it once. sinkprune-export sets it before the first import.
            env={**os.environ, **single, "PYTHONPATH": search, "TRANSFORMERS_VERBOSITY": "error"},
            text=True,
            # Ctrl-C is for this process alone.
            start_new_session=True,
        )

    def __call__(self, call: Call) -> Outcome:
        """Make the call and return its outcome."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(dataclasses.asdict(call)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker ended with {self._process.wait()} at {call}")
        fields: dict[str, Any] = json.loads(answer)
        return Outcome(**{**fields, "seen": tuple(fields["seen"])})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


_OUTPUT_BYTES = 1 << 20
"""The bytes of each stream that are read; more are not needed to judge it."""


def serve(modules: list[str]) -> None:
    """Import `modules`, then fork for each line of stdin until there are no more."""
    # stdout is for outcomes only. The output of libraries is discarded.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    # transformers imports an installed torch, which takes seconds and half a gigabyte.
    sys.modules["torch"] = None  # type: ignore[assignment]
    for module in modules:
        import_module(module)
    _import_onnxruntime()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(outcome_of(Call(**json.loads(line)))) + "\n")
        answers.flush()


def _import_onnxruntime() -> None:
    """Import ONNX Runtime as the package does, with the same settings."""
    from sinkprune.runtime.backends import load_backend

    load_backend("ort-cpu", 1)


def outcome_of(call: Call) -> dict[str, Any]:
    """Fork, wait for the call until its time limit, and return the fields of an `Outcome`."""
    streams = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "report")]
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for number, stream in enumerate(streams[:3]):
                os.dup2(stream, number)
            sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
            run_here(call, streams[3])
        finally:
            os._exit(1)
    timed_out = not _ended(child, call.seconds)
    seconds = time.monotonic() - start
    _kill_group(child)
    _, status, usage = os.wait4(child, 0)
    texts = [_text(stream) for stream in streams]
    for stream in streams:
        os.close(stream)
    notes = [line.partition(" ") for line in texts[3].splitlines()]
    return {
        "code": os.waitstatus_to_exitcode(status),
        "stdout": texts[1],
        "stderr": texts[2],
        "seconds": round(seconds, 3),
        "timed_out": timed_out,
        "peak_bytes": usage.ru_maxrss << 10,
        "address_space": next((int(rest) for word, _, rest in notes if word == "address"), None),
        "seen": [rest for word, _, rest in notes if word == "saw"],
    }


def _ended(child: int, seconds: float) -> bool:
    """Wait, and return whether `child` ended within `seconds`."""
    handle = os.pidfd_open(child)
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))
    finally:
        os.close(handle)


def _kill_group(child: int) -> None:
    """Kill `child` and its children. It leads a process group."""
    for end in (os.killpg, os.kill):
        try:
            end(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _text(stream: int) -> str:
    return os.pread(stream, _OUTPUT_BYTES, 0).decode(errors="replace")


if __name__ == "__main__":
    serve(sys.argv[1:])
