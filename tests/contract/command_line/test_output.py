"""What commands print: progress on a terminal only, results also where nobody reads, notes about measurements."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.command_line.progress import status
from sinkprune.contract.command_line.table_console import noise_note
from sinkprune.contract.report import Spread
from sinkprune.deadlines.measuring import shown_progress
from sinkprune.engines.progress import TerminalProgress
from sinkprune.policies.act import main as act
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.reports import progress_bar
from sinkprune.runtime.commands.run import main as run
from support.programs.commands import Terminal, without_notes


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


def test_progress_is_shown_on_a_terminal_only() -> None:
    for work, *said in (
        (report_parts, "6.2 of 7 M weights", "checking sums: 0 of 12345 files"),
        (count_steps, "asking with none: 13 of 40 answers"),
        (build, "checking sums"),
    ):
        text = shown(work)
        assert all(words in text for words in said) and "\x1b[2J" not in text
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


class ClosedPipe(io.StringIO):
    """Standard output without a buffer, that a reader has closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_without_files_the_work_ends(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frames").mkdir()
    for number in range(2):
        os.link(photo_file, tmp_path / "frames" / f"{number}.jpg")
    policy = bundle("pi0", budgets=("prune-77.8", "prune-88.9"), max_images=2)
    moments = ("--camera", tmp_path / "frames", "--camera", "none", "--instruction", "pick up the cup")
    done, whole = [], Policy.act
    monkeypatch.setattr(Policy, "act", lambda *given, **options: done.append(1) or whole(*given, **options))
    words = (policy, *moments, "--state", "0.1,0.2,0.3,0.4,0.5")
    with redirect_stdout(ClosedPipe()), redirect_stderr(io.StringIO()) as stderr:
        assert act([*map(str, words)]) == 0
    assert re.fullmatch("cameras: [^\n]*\n", without_notes(stderr.getvalue()))
    assert len(done) == 1


def test_an_order_within_the_spread_is_doubted() -> None:
    quick, close, slow = Spread(10.0, 12.0), Spread(11.0, 11.5), Spread(20.0, 21.0)
    note = noise_note("TTFT", 5, {"none": slow, "a": close, "b": quick})
    assert note.startswith("warning: TTFT differs by up to 20 % from run to run") and "quicker: b or a;" in note
    assert "warning" not in noise_note("TTFT", 5, {"none": slow, "a": close})
    assert "one round" in noise_note("TTFT", 1, {"none": slow, "a": close})
