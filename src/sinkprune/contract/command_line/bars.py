"""Bars on a terminal's stderr. Importing this is slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sinkprune.contract.checks import escaped
from sinkprune.contract.progress import OnProgress


def new_bars() -> Progress:
    """Return bars for stderr, which are shown on a terminal only and removed at their end.

    They have the tasks' descriptions, which may have markup characters, and the times so far and to go.
    """
    console = Console(stderr=True)
    columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn()]
    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    times = [TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(spinner, *columns, *times, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def status_bar(text: str) -> Iterator[OnProgress]:
    """Show `text` while the block runs; yields a function that shows what is done and the time left."""
    with new_bars() as bars:
        task = bars.add_task(escaped(text), total=None)

        def report(what: str, done: float, total: float, unit: str) -> None:
            if done < bars.tasks[0].completed:
                bars.reset(task)
            steps = f"{round(done, 1):.9g}" + (f" of {round(total, 1):.9g}" if total else "")
            bars.update(task, description=escaped(f"{what}: {steps} {unit}"), completed=done, total=total or None)

        yield report
