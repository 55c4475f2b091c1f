"""The progress that an export shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sinkprune.contract.command_line.progress_lines import ProgressLines


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int], None]]:
    """Show a bar on stderr, or a line every ten seconds: the graph being written and the weights so far.

    Yields a function that takes the name of the present step, and the number of weights since the last call.
    """
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
        task = progress.add_task("reading", total=None)

        def show(what: str, weights: int) -> None:
            progress.update(task, description=what, advance=weights / 1e6)
            lines.update(what, advance=weights / 1e6)

        yield show
