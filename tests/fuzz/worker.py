"""A process that imports everything, forks for each call that it reads from stdin, and prints the outcome as JSON.

Forks allow tens of calls a second, because imports take longer than most calls. This process computes nothing before
a fork: the threads of engine libraries do not exist in the child.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
from importlib import import_module
from typing import Any

from fuzz.child import Call, run_here

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
