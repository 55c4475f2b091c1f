"""The process of a form, from the side of the benchmark."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from peer_engines.engine import Form, NotRunError, Question
from sinkprune.contract.child_processes import python_command

LOADING_SECONDS, ANSWERING_SECONDS, PREPARING_SECONDS = 600, 300, 3600
_BENCHMARKS = Path(__file__).parents[1]


class Process:
    """A form in a process of its own; `facts` is its first message, after loading."""

    def __init__(self, form: Form, place: Path, threads: int, log: IO[bytes]) -> None:
        """Start the process, and wait until it has loaded; raises `NotRunError`."""
        self.form = form
        self._process = _start(form, place, threads, log)
        try:
            self.facts = self._receive(LOADING_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, question: Question) -> Mapping[str, Any]:
        """Return the fields of a `Timing`, and `peak_bytes`; raises `NotRunError` after a failure or a timeout."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(asdict(question)) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise NotRunError(self._ended()) from error
        return self._receive(ANSWERING_SECONDS)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _receive(self, seconds: float) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = _line(self._process.stdout, seconds)
        if not line:
            self._process.poll()
            raise NotRunError(self._ended() if line == b"" else f"it sent nothing for {seconds:.0f} s")
        return _message(line)

    def _ended(self) -> str:
        code = self._process.wait()
        return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with {code}"


def prepare(form: Form, place: Path, threads: int, log: IO[bytes]) -> None:
    """Convert the form in a process of its own, which frees its memory at its end; raises `NotRunError`."""
    process = _start(form, place, threads, log, "--prepare")
    try:
        output, _ = process.communicate(timeout=PREPARING_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NotRunError(f"it was not converted within {PREPARING_SECONDS} s") from error
    finally:
        process.kill()
    if not output:
        raise NotRunError(f"converting ended with {process.returncode}")
    _message(output)


def _message(line: bytes) -> dict[str, Any]:
    """Parse a message of the process; raises `NotRunError` if it reports a failure."""
    message: dict[str, Any] = json.loads(line)
    if "failed" in message:
        raise NotRunError(message["failed"])
    return message


def _start(form: Form, place: Path, threads: int, log: IO[bytes], *more: str) -> subprocess.Popen[bytes]:
    program = "from peer_engines.worker import main; sys.exit(main(sys.argv[1:]))"
    command = python_command(program, form.engine, form.name, str(place), str(threads), *more)
    paths = [str(_BENCHMARKS), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(threads),
        # No telemetry and no downloads. OpenVINO's telemetry respects CI only.
        "CI": "true",
        "HF_HUB_OFFLINE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment)


def _line(stream: IO[bytes], seconds: float) -> bytes | None:
    """Return the next line; empty at the end of the stream, None after a timeout."""
    ready, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if ready else None
