"""Starts worker processes, sends them calls and reads the outcomes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.child import Call

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
