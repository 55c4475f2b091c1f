"""Lines of progress never come after the message that ends a command."""

from __future__ import annotations

import io
import re
import threading
import time
from contextlib import redirect_stderr, suppress

import pytest

from sinkprune.contract.command_line import progress_lines
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.command_parser import CommandParser
from sinkprune.contract.command_line.progress_lines import ProgressLines, starting
from sinkprune.contract.errors import UsageError


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come a hundred times a second."""
    monkeypatch.setattr(progress_lines, "SECONDS", 0.01)


def test_a_line_that_has_begun_comes_before_what_follows_the_block() -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            if text.startswith("answering"):
                time.sleep(0.3)
            return super().write(text)

    with redirect_stderr(Slow()) as stderr:
        with suppress(UsageError), ProgressLines("answering", seconds=0.05):
            # The first line is being written.
            time.sleep(0.1)
            raise UsageError("x")
        stderr.write("error: x\n")
        time.sleep(0.5)
    assert stderr.getvalue() == "answering: 0 s\nerror: x\n"


def test_a_stderr_that_takes_nothing_does_not_hold_up_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "_BLOCKED_SECONDS", 0.1)
    free = threading.Event()

    class Blocked(io.StringIO):
        def write(self, text: str) -> int:
            free.wait(20)
            return len(text)

    began = time.monotonic()
    with redirect_stderr(Blocked()), suppress(UsageError), ProgressLines("answering", seconds=0.05):
        time.sleep(0.1)
        raise UsageError("x")
    took = time.monotonic() - began
    free.set()
    assert took < 10


@pytest.mark.parametrize("error", [UsageError("x"), KeyboardInterrupt("x")])
def test_no_line_of_the_start_comes_after_an_error(error: BaseException, soon: None) -> None:
    def body(arguments: object) -> None:
        time.sleep(0.3)
        raise error

    with redirect_stderr(io.StringIO()) as stderr, starting():
        run_command(body, None)
        # A command may take a while to end.
        time.sleep(0.1)
    assert re.fullmatch(r"(starting: \d s\n)+(error: |interrupted; )x\n", stderr.getvalue())


def test_no_line_of_the_start_comes_after_a_wrong_option(soon: None) -> None:
    with redirect_stderr(io.StringIO()) as stderr, starting():
        time.sleep(0.3)
        with pytest.raises(SystemExit):
            CommandParser("sinkprune run", "", "").parse_args(["--wrong"])
        time.sleep(0.1)
    assert stderr.getvalue().splitlines()[-1].startswith("error: ")
