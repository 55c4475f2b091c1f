"""Runs the commands by their entry points, parses their options, kills them, and asserts success and refusals."""

from __future__ import annotations

import argparse
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sinkprune.command import VERBS

BIN = Path(sys.executable).parent
"""The folder of the installed commands."""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"
"""A program that begins with this cannot import PyTorch."""


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
        code = import_module(VERBS[command.removeprefix("sinkprune-")].module).main([*map(str, arguments)])
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def succeed(command: str, *arguments: object) -> Outcome:
    """Run a command that must end with exit code 0."""
    outcome = run(command, *arguments)
    assert outcome.code == 0, outcome.stderr
    return outcome


class Terminal(io.StringIO):
    """A stream that is a terminal."""

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


def interrupt_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, in which Ctrl-C is pressed after so many calls."""
    left = iter(range(calls))

    def interrupted(*given: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*given, **options)

    return interrupted


def kill_when(pattern: str, folder: Path, command: str, *arguments: object) -> None:
    """Run a command in a new process, and kill it when something in `folder` matches `pattern`.

    The command ends by itself if the match is too short to be found.
    """
    words = own_process(command, *arguments)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not any(folder.glob(pattern)) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        _, stderr = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), stderr


def left(output: Path) -> list[str]:
    """Return the temporary files and folders next to `output`."""
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(f".{output.name}."))


class Parsed(Exception):
    """A command's options were accepted."""


def check_options(command: str, *words: str) -> argparse.Namespace:
    """Return what a command's parser makes of the words. The test fails if the parser rejects them."""
    found: list[argparse.Namespace] = []
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **named: Any) -> argparse.Namespace:
        found.append(parse(self, *given, **named))
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        run(command, *words)
    return found[0]
