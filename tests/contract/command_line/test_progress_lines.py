"""Progress lines on a stderr that is no terminal: their text, their times, and none for short runs."""

from __future__ import annotations

import io
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sinkprune.contract.command_line import progress_lines
from sinkprune.contract.command_line.progress_lines import ProgressLines, shown_progress, starting, status
from sinkprune.engines.progress import TerminalProgress
from support.programs.commands import own_process, run

Bundles = Callable[..., Path]
SLOW_IMPORT = """
import sys, time
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {!r}:
            time.sleep(2.5)
sys.meta_path.insert(0, Finder)
"""
"""A `sitecustomize` that delays the import of one package."""


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def lines_after(wanted: str, stderr: io.StringIO) -> list[str]:
    """Return the lines so far, after waiting for `wanted`."""
    for _ in range(2000):
        if wanted in stderr.getvalue():
            return stderr.getvalue().splitlines()
        time.sleep(0.01)
    raise AssertionError(stderr.getvalue())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come a hundred times a second."""
    monkeypatch.setattr(progress_lines, "SECONDS", 0.01)


def test_a_line_has_the_steps_done_the_rate_and_the_time_left() -> None:
    lines = ProgressLines("measuring", 40, "answers")
    assert lines.line(10) == "measuring: 0 of 40 answers in 10 s"
    assert ProgressLines("loading").line(10) == "loading: 10 s"
    lines.update("retain-64", advance=4)
    lines.update(advance=1)
    assert lines.line(10) == "retain-64: 5 of 40 answers in 10 s, 0.5 answers a second, 70 s left"
    lines.update(done=40)
    assert lines.line(20).endswith("40 of 40 answers in 20 s, 2 answers a second, 0 s left")
    unknown = ProgressLines("reading\x1b", unit="M weights")
    unknown.update(advance=1234.5)
    assert unknown.line(100) == "reading\\x1b: 1234.5 M weights in 100 s, 12.3 M weights a second"


def test_a_line_has_no_rate_of_the_first_steps_alone() -> None:
    lines = ProgressLines("asking", 3740, "answers")
    lines.update(advance=1)
    assert lines.line(2) == "asking: 1 of 3740 answers in 2 s"
    lines.update(advance=1)
    assert lines.line(12) == "asking: 2 of 3740 answers in 12 s"
    lines.update(advance=1)
    assert lines.line(3) == "asking: 3 of 3740 answers in 3 s"
    assert lines.line(10) == "asking: 3 of 3740 answers in 10 s, 0.3 answers a second, 3.5 h left"
    lines.update(done=75)
    assert lines.line(5).endswith("75 of 3740 answers in 5 s, 15 answers a second, 4 min left")


def test_a_line_has_minutes_hours_and_rounded_weights() -> None:
    lines = ProgressLines("decoder_0", 6.41434, "M weights")
    lines.update(done=1e-5)
    assert lines.line(1).startswith("decoder_0: 0 of 6.4 M weights in 1 s")
    lines.update(done=0.147456)
    assert lines.line(1).startswith("decoder_0: 0.1 of 6.4 M weights in 1 s, ")
    lines.update(done=3.2071)
    assert lines.line(180) == "decoder_0: 3.2 of 6.4 M weights in 3 min, 0.0178 M weights a second, 3 min left"
    lines.update(done=5.0)
    assert lines.line(9000).startswith("decoder_0: 5 of 6.4 M weights in 2.5 h, ")
    assert ProgressLines("waiting").line(180) == "waiting: 3 min"


def test_a_line_comes_each_time_and_none_after_the_end() -> None:
    assert progress_lines.SECONDS >= 10
    with redirect_stderr(io.StringIO()) as stderr:
        with ProgressLines("waiting", seconds=0.02):
            assert len(lines_after("waiting: 0 s\nwaiting", stderr)) >= 2
        written = stderr.getvalue()
        with ProgressLines("short"):
            time.sleep(0.1)
        assert stderr.getvalue() == written


def test_progress_does_not_wait_for_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` does, and for good where the thread has too little memory to begin."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("waits"))
    stderr = io.StringIO()
    with redirect_stderr(stderr), ProgressLines("looking", seconds=0.05):
        time.sleep(0.3)
    assert stderr.getvalue().startswith("looking: ")


def test_work_of_nine_seconds_writes_a_line_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(took: float, error: type[Exception] | None = None) -> str:
        now = iter((0.0, took, took))
        monkeypatch.setattr(progress_lines, "time", SimpleNamespace(monotonic=lambda: next(now)))
        with redirect_stderr(io.StringIO()) as stderr, suppress(KeyError), ProgressLines("loading", seconds=10.0):
            if error:
                raise error
        return stderr.getvalue()

    assert written(9) == "loading: 9 s\n"
    assert written(4) == ""
    assert written(9, KeyError) == ""


def test_the_first_line_comes_after_a_fifth_of_the_time() -> None:
    stderr = io.StringIO()
    with redirect_stderr(stderr), ProgressLines("measuring", seconds=60):
        assert stderr.getvalue() == ""
    with redirect_stderr(stderr), ProgressLines("measuring", seconds=2):
        began = time.monotonic()
        lines_after("measuring", stderr)
        # The second line is two seconds behind the first.
        assert 0.3 < time.monotonic() - began < 2


def test_a_part_that_begins_has_steps_and_time_of_its_own() -> None:
    lines = ProgressLines("reading")
    lines.report("exporting", 4, 8, "M weights")
    lines.report("exporting", 6, 8, "M weights")
    assert lines.line(6) == "exporting: 6 of 8 M weights in 6 s, 1 M weights a second, 2 s left"
    lines.report("checking sums", 0, 2, "GB")
    assert lines.line(2) == "checking sums: 0 of 2 GB in 2 s"
    lines.report("checking sums", 0.5, 2, "GB")
    assert lines.line(2).startswith("checking sums: 0.5 of 2 GB in 2 s, 0.25 GB a second")


def test_a_terminal_has_lines_where_it_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "SECONDS", 1.0)
    with redirect_stderr(Terminal()) as terminal, starting():
        # Longer than a command is silent.
        with ProgressLines("loading", beside_bar=True):
            time.sleep(0.3)
        # The bar ended a moment ago, so no line is due.
        with ProgressLines("answering", seconds=10.0):
            time.sleep(0.1)
            assert terminal.getvalue() == ""
            lines_after("answering: ", terminal)


def test_builds_and_exports_have_lines(soon: None) -> None:
    with redirect_stderr(io.StringIO()) as stderr:
        with TerminalProgress() as progress:
            progress.graph("decoder_0", 2, 8)
            lines_after("building engines: 2 of 8 graphs in", stderr)
        with status("reading") as progress:
            progress("exporting", 2.5, 7, "M weights")
            lines_after("exporting: 2.5 of 7 M weights in", stderr)


def test_progress_of_a_python_function_goes_where_its_argument_says(soon: None) -> None:
    reported = list[tuple[Any, ...]]()
    for argument in (True, False, lambda *each: reported.append(each)):
        with redirect_stderr(io.StringIO()) as stderr, shown_progress("measuring", argument) as progress:
            progress("measuring costs", 2, 7, "rounds")
            if argument is True:
                lines_after("measuring costs: 2 of 7 rounds in", stderr)
            else:
                time.sleep(0.1)
                assert stderr.getvalue() == ""
    assert reported == [("measuring costs", 2, 7, "rounds")]
    for wrong in (None, 1, "yes"):
        with pytest.raises(TypeError, match="progress is"), shown_progress("measuring", wrong):  # type: ignore[arg-type]
            pass


def test_a_terminal_shows_the_parts_of_work() -> None:
    with redirect_stderr(Terminal()) as terminal, status("reading") as progress:
        progress("exporting", 2.5, 7, "M weights")
        lines_after("exporting: 2.5 of 7 M weights in 0 s", terminal)


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("sinkprune-run", ["--image", "PHOTO", "--prompt", "What?", "--json"], "answering: "),
        ("sinkprune-profile", ["--image", "PHOTO", "--prompt", "What?", "--repeat", "9"], r"measuring \S+: \d+ of "),
        ("sinkprune-evaluate", ["--limit", "8", "--budgets", "retain-64"], r"asking with .*: \d+ of .* answers in "),
        ("sinkprune-calibrate norms", [], r"looking: \d+ of \d+ pictures in "),
        (
            "sinkprune-run",
            ["--image", "PHOTO", "--prompt", "What?", "--deadline-ms", "9000", "--warm-up"],
            r"measuring costs: [\d.]+ of \d+ rounds in ",
        ),
        (
            "sinkprune-calibrate schedule",
            ["--budget-tokens", 20, "--dry-run", "--seconds", 0],
            r"measuring costs: [\d.]+ of \d+ rounds[\s\S]*^measuring attention: [\s\S]*^measuring budgets: [\d.]+ of",
        ),
    ],
)
def test_commands_have_lines(
    command: str, options: list[Any], said: str, soon: None, bundle: Bundles, photo_file: Path
) -> None:
    given = [photo_file if option == "PHOTO" else option for option in options]
    outcome = run(*command.split(), bundle("gqa-112"), *given)
    assert outcome.code == 0, outcome.stderr
    assert re.search(f"^{said}", outcome.stderr, re.MULTILINE), outcome.stderr


def test_no_line_comes_after_the_end_of_lines() -> None:
    with redirect_stderr(io.StringIO()) as stderr, ProgressLines("answering", seconds=0.05) as lines:
        lines.end()
        time.sleep(0.2)
    assert stderr.getvalue() == ""


def process_with_slow_import(package: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, in which the import of `package` takes 2.5 seconds."""
    (folder / "sitecustomize.py").write_text(SLOW_IMPORT.format(package))
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command, *rest = map(str, words)
    return subprocess.run(
        own_process(command, *rest), capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )


@pytest.mark.parametrize(("package", "said"), [("PIL.Image", "starting"), ("onnxruntime", "loading packages")])
def test_slow_imports_have_a_line(package: str, said: str, tmp_path: Path, bundle: Bundles, photo_file: Path) -> None:
    words = ("sinkprune-run", bundle("gqa-112"), "--image", photo_file, "--prompt", "What?", "--max-new-tokens", 2)
    done = process_with_slow_import(package, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert re.search(f"^{said}: [1-9] s$", done.stderr, re.MULTILINE), done.stderr


def test_a_command_without_slow_imports_has_no_line(tmp_path: Path) -> None:
    # `--version` does not import it.
    done = process_with_slow_import("PIL.Image", tmp_path, "sinkprune-run", "--version")
    assert (done.returncode, done.stderr) == (0, "")


def test_lines_of_the_start_end_when_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "SECONDS", 0.05)
    # A terminal shows no other line before its first bar.
    for stderr in (io.StringIO(), Terminal()):
        with redirect_stderr(stderr), starting():
            lines_after("starting: 0 s\n", stderr)
            with ProgressLines("working", seconds=60):
                time.sleep(0.05)
                written = stderr.getvalue()
                time.sleep(0.2)
            time.sleep(0.2)
        assert stderr.getvalue() == written
    with redirect_stderr(io.StringIO()) as silent:
        with starting(), status("working"):
            pass
        time.sleep(0.1)
    assert silent.getvalue() == ""


def test_short_parts_of_a_command_have_a_line_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_lines, "SECONDS", 1.0)

    def written() -> list[str]:
        with redirect_stderr(io.StringIO()) as stderr:
            for number in range(6):
                with ProgressLines(f"part {number}"):
                    time.sleep(0.1)
        return stderr.getvalue().splitlines()

    assert written() == []
    with starting():
        (line,) = written()
    # After a fifth of a second; the next is due a second later.
    assert re.fullmatch(r"part [1-5]: 0 s", line)
    assert written() == []


@pytest.mark.parametrize(
    ("lines", "after", "expected"),
    [((), 0.5, 1.5), ((), 1.5, 0.5), ((), 5, 0), ((2,), 5, 2), ((2,), 11, 1), ((2,), 30, 0)],
)
def test_the_first_line_of_a_part_counts_from_the_last_of_its_command(
    lines: tuple[float, ...], after: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [0.0], list[float]()
    monkeypatch.setattr(progress_lines, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress_lines, "SECONDS", 10.0)
    with redirect_stderr(io.StringIO()), starting():
        for now[0] in lines:
            ProgressLines("earlier")._write()
        now[0] = after
        part = ProgressLines("part")
        part._ended = SimpleNamespace(wait=lambda wait: not waits.append(wait))  # type: ignore[assignment, func-returns-value]
        part._run()
    assert waits == [expected]
