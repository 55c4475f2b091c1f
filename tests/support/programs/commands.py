"""Runs the commands by their entry points, and asserts refusals."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from sinkprune.calibration.commands.calibrate import main as calibrate
from sinkprune.calibration.commands.evaluate import main as evaluate
from sinkprune.engines.command import main as build
from sinkprune.engines.gate.command import main as check
from sinkprune.export.command import main as export
from sinkprune.jetson.doctor import main as doctor
from sinkprune.jetson.replay import main as replay
from sinkprune.policies.act import main as act
from sinkprune.runtime.commands.profile import main as profile
from sinkprune.runtime.commands.run import main as run_
from sinkprune.serving.command import main as serve

BIN = Path(sys.executable).parent
"""The folder of the installed commands."""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"
"""A program that begins with this cannot import PyTorch."""

_ENTRY_POINTS = {
    "sinkprune-export": export,
    "sinkprune-build": build,
    "sinkprune-check": check,
    "sinkprune-run": run_,
    "sinkprune-act": act,
    "sinkprune-profile": profile,
    "sinkprune-serve": serve,
    "sinkprune-evaluate": evaluate,
    "sinkprune-calibrate": calibrate,
    "sinkprune-doctor": doctor,
    "sinkprune-replay": replay,
}


def own_process(command: str, *arguments: object) -> list[str]:
    """Return the words that run a command in a new process, as its installed script does.

    The process cannot import PyTorch. No command needs it, and its import by transformers takes longer than most
    commands.
    """
    name = command.removeprefix("sinkprune-")
    program = f"{WITHOUT_TORCH}; from sinkprune.entry_points import {name}; sys.exit({name}())"
    return [sys.executable, "-c", program, *map(str, arguments)]


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str


def run(command: str, *arguments: object) -> Outcome:
    """Run a command's entry point to its end."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = _ENTRY_POINTS[command]([*map(str, arguments)])
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def without_notes(stderr: str) -> str:
    """Return `stderr` without its lines about pictures of which the model sees a part: they come before the work."""
    return re.sub(r"^.*: the model sees [^\n]* of the picture \(.*\n", "", stderr, flags=re.MULTILINE)


def wrote(*files: object) -> str:
    """Return the lines on stderr about files that a command wrote."""
    return "".join(f"wrote {file}\n" for file in files)


def assert_refused(outcome: Outcome, *said: str) -> None:
    """Assert exit code 2 and one message that has all of `said`, without a traceback or other output."""
    assert outcome.code == 2, outcome.stderr
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr
    message = without_notes(outcome.stderr)
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    for words in said:
        assert words in outcome.stderr
