"""The progress that an export shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sinkprune.contract.command_line.progress_lines import ProgressLines


class WeightProgress:
    """Reports the graph that is being written and how many weights are done."""

    def __init__(self, lines: ProgressLines, bar: Progress) -> None:
        self._lines, self._bar, self._task = lines, bar, bar.add_task("reading", total=None)
        self._what, self._total = "reading", 0

    def expect(self, weights: int) -> None:
        """Count the weights of all graphs together, `weights` in all."""
        self._total = weights
        self._bar.update(self._task, total=weights / 1e6)
        self._lines.update(total=weights / 1e6)

    def __call__(self, what: str, weights: int) -> None:
        """Report that `weights` more are done, of the part `what`."""
        self._bar.update(self._task, description=what, advance=weights / 1e6)
        if what != self._what and not self._total:
            self._lines.restart(what)
        self._what = what
        self._lines.update(what, advance=weights / 1e6)


@contextmanager
def shown_progress() -> Iterator[WeightProgress]:
    """Show a bar on stderr, or lines where stderr is no terminal."""
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(pulse_style="cyan"),
        TextColumn("{task.completed:>9.1f} M weights"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with (
        ProgressLines("reading", unit="M weights") as lines,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        yield WeightProgress(lines, progress)
