"""The progress of commands: bars on a terminal's stderr, and nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sinkprune.contract.checks import escaped
from sinkprune.contract.progress import OnProgress, unreported

if TYPE_CHECKING:
    from rich.progress import Progress


def new_bars() -> Progress:
    """Return bars for stderr, which are shown on a terminal only and removed at their end.

    They have the tasks' descriptions, which may have markup characters, and the times so far and to go.
    """
    # Slow to import.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn()]
    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    times = [TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(spinner, *columns, *times, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def status(text: str) -> Iterator[OnProgress]:
    """Show `text` on a terminal while the block runs; yields a function that shows what is done and the time left."""
    if not sys.stderr.isatty():
        yield unreported
        return
    with new_bars() as bars:
        task = bars.add_task(escaped(text), total=None)

        def report(what: str, done: float, total: float, unit: str) -> None:
            if done < bars.tasks[0].completed:
                bars.reset(task)
            steps = f"{round(done, 1):.9g}" + (f" of {round(total, 1):.9g}" if total else "")
            bars.update(task, description=escaped(f"{what}: {steps} {unit}"), completed=done, total=total or None)

        yield report
