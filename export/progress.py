"""What an export shows while it works."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class ExportProgress:
    """A line on stderr: the graph being written and the weights done so far. Silent where stderr is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<14}"),
            BarColumn(pulse_style="cyan"),
            TextColumn("{task.fields[weights]:>9.1f} M weights"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("reading", total=None, weights=0.0)
        self._weights = 0

    def __enter__(self) -> ExportProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, what: str, weights: int) -> None:
        self._weights += weights
        self._progress.update(self._task, description=what, weights=self._weights / 1e6)
