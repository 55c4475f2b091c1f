"""A form's process, as the one that asks sees it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from peer_engines.engine import Form, NotRunError, Question
from sinkprune.contract.system.child_processes import python_command

LOADING_SECONDS, ANSWERING_SECONDS, PREPARING_SECONDS = 600, 300, 3600
_BENCHMARKS = Path(__file__).parents[1]


class Process:
    """A form in a process of its own; `facts` is what it said when it had loaded."""

    def __init__(self, form: Form, place: Path, threads: int, log: IO[bytes]) -> None:
        """Starts it and waits until it has loaded; raises `NotRunError`."""
        self.form = form
        self._process = _start(form, place, threads, log)
        try:
            self.facts = self._hear(LOADING_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, question: Question) -> Mapping[str, Any]:
        """The fields of a `Timing`, and `peak_bytes`; raises `NotRunError` where it fails, dies or never answers."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(asdict(question)) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise NotRunError(self._ended()) from error
        return self._hear(ANSWERING_SECONDS)

    @property
    def resident_bytes(self) -> int:
        """Memory it holds now, mapped files included; 0 where the system does not tell."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text()
        except OSError:
            return 0
        sizes = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(sizes[0]) * 1024 if sizes else 0

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _hear(self, seconds: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = _line(self._process.stdout, seconds)
        if not line:
            self._process.poll()
            raise NotRunError(self._ended() if line == b"" else f"it said nothing for {seconds:.0f} s")
        message: dict[str, Any] = json.loads(line)
        if "failed" in message:
            raise NotRunError(message["failed"])
        return message

    def _ended(self) -> str:
        code = self._process.wait()
        return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"


def prepare(form: Form, place: Path, threads: int, log: IO[bytes]) -> None:
    """Have the form converted, in a process of its own that gives its memory back; raises `NotRunError`."""
    process = _start(form, place, threads, log, "--prepare")
    try:
        said, _ = process.communicate(timeout=PREPARING_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"it was not converted within {PREPARING_SECONDS} s") from error
    finally:
        process.kill()
    message = json.loads(said) if said else {"failed": f"converting ended with {process.returncode}"}
    if "failed" in message:
        raise NotRunError(message["failed"])


def _start(form: Form, place: Path, threads: int, log: IO[bytes], *more: str) -> subprocess.Popen[bytes]:
    program = "from peer_engines.worker import main; sys.exit(main(sys.argv[1:]))"
    command = python_command(program, form.engine, form.name, str(place), str(threads), *more)
    paths = [str(_BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(threads),
        # Nobody is told of what is measured, and nothing is fetched. OpenVINO's telemetry heeds CI alone.
        "CI": "true",
        "HF_HUB_OFFLINE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)


def _line(stream: IO[bytes], seconds: float) -> bytes | None:
    """The next line; empty where the stream ended, None where none came in time."""
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(max(0.0, until - time.monotonic())):
            return None
    return stream.readline()
