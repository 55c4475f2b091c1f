"""Progress on a terminal's stderr, and none elsewhere."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.command_line.progress import status
from sinkprune.deadlines.measuring import shown_progress
from sinkprune.engines.progress import TerminalProgress
from sinkprune.runtime.commands.reports import progress_bar
from sinkprune.runtime.commands.run import main as run
from support.programs.commands import Terminal


def shown(work: Callable[[], object], stderr: io.StringIO | None = None) -> str:
    """Return what `work` writes on a terminal, or on another `stderr`."""
    with redirect_stderr(stderr or Terminal()) as written:
        work()
    return written.getvalue()


def report_parts() -> None:
    with status("reading\x1b[2J") as report:
        report("exporting [x]", 2.5, 7, "M weights")
        report("exporting [x]", 6.25, 7, "M weights")
        report("checking sums", 0, 12345, "files")


def count_steps() -> None:
    with progress_bar("asking", 40, "answers") as count:
        count()
        count("asking with none", 12)


def build() -> None:
    with TerminalProgress() as progress:
        progress.graph("decoder_0", 2, 8)
        progress.phase_start("tactics", None, 9)
        progress.phase_finish("tactics")
        progress.part("checking sums", 1, 2, "GB")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (report_parts, ("6.2 of 7 M weights", "checking sums: 0 of 12345 files")),
        (count_steps, ("asking with none: 13 of 40 answers",)),
        (build, ("checking sums",)),
    ],
)
def test_progress_is_shown_on_a_terminal_only(work: Callable[[], object], said: tuple[str, ...]) -> None:
    text = shown(work)
    for words in said:
        assert words in text
    assert "\x1b[2J" not in text
    assert shown(work, io.StringIO()) == ""


def test_progress_of_a_python_function_goes_where_its_argument_says() -> None:
    reported = list[tuple[Any, ...]]()

    def measure(progress: Any) -> None:
        with shown_progress("measuring", progress) as report:
            report("measuring costs", 2, 7, "rounds")

    assert "measuring costs: 2 of 7 rounds" in shown(lambda: measure(True))
    assert shown(lambda: measure(False)) == shown(lambda: measure(lambda *each: reported.append(each))) == ""
    assert reported == [("measuring costs", 2, 7, "rounds")]
    for wrong in (None, 1, "yes"):
        with pytest.raises(TypeError, match="progress is"):
            measure(wrong)


@pytest.mark.parametrize("alone", [True, False])
def test_a_command_on_a_terminal_keeps_its_standard_output(
    alone: bool, bundle: Callable[..., Path], photo_file: Path
) -> None:
    words = [str(bundle("gqa-112")), "--image", str(photo_file), "--prompt", "What?", "--max-new-tokens", "4"]
    with redirect_stdout(io.StringIO()) as stdout:
        text = shown(lambda: run([*words, *(["--json"] if alone else [])]))
    assert "answering" in text
    assert "\x1b" not in stdout.getvalue()
    assert stdout.getvalue().startswith("{") == alone
