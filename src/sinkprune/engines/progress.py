"""What a build shows while it works, and how Ctrl-C ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sinkprune.contract.command_line.progress_lines import ProgressLines


class BuildProgress:
    """Is told how far a build is: of its graphs, and of the phases within one, which nest. Shows nothing by itself.

    Calls may come from any thread.
    """

    def tell(self, line: str) -> None:
        """A line worth knowing: what the build needs and what is free, or what it leaves."""

    def graph(self, name: str, number: int, total: int) -> None:
        """The graph `name` is being built, after `number` of `total` others."""

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """The phase `name` of so many steps begins, within the phase `parent` if there is one."""

    def step_complete(self, name: str, step: int) -> None:
        """The step `step`, counted from 0, of the phase `name` is done."""

    def phase_finish(self, name: str) -> None:
        """The phase `name` is over, done or not."""


SILENT = BuildProgress()
"""Shows nothing of a build."""


class TerminalProgress(BuildProgress, Progress):
    """Shows a build on stderr: a bar of its graphs, and below it the phases that run; lines without a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._lines = ProgressLines("reading", unit="graphs")
        self._graphs = self.add_task("reading", total=None)
        self._phases: dict[str, TaskID] = {}
        self._depths: dict[str, int] = {}

    def start(self) -> None:
        """Begin to show what is done."""
        self._lines.__enter__()
        super().start()

    def stop(self) -> None:
        """Show nothing more."""
        super().stop()
        self._lines.__exit__(None, None, None)

    def tell(self, line: str) -> None:
        """Write the line, also without a terminal."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def graph(self, name: str, number: int, total: int) -> None:
        """Set the bar of all graphs to `number` of `total`, with the name of the one that is built."""
        self.update(self._graphs, description=name, completed=number, total=total)
        self._lines.update(name, done=number, total=total)

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """Add a bar for the phase, indented below its parent's."""
        self._depths[name] = self._depths.get(parent or "", 0) + 1
        self._phases[name] = self.add_task("  " * self._depths[name] + name, total=steps)

    def step_complete(self, name: str, step: int) -> None:
        """Advance the phase's bar behind the step `step`, counted from 0."""
        if name in self._phases:
            self.update(self._phases[name], completed=step + 1)

    def phase_finish(self, name: str) -> None:
        """Take the phase's bar away."""
        if name in self._phases:
            self.remove_task(self._phases.pop(name))


def new_monitor(trt: Any, progress: BuildProgress, interrupted: threading.Event) -> Any:
    """An `IProgressMonitor` of the library `trt` that tells `progress`, and ends the build once `interrupted` is set.

    The builder must not outlive it.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.phase_start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress.step_complete(phase_name, step)
            return not interrupted.is_set()

        def phase_finish(self, phase_name: str) -> None:
            progress.phase_finish(phase_name)

    return Monitor()


@contextmanager
def interrupts_noted() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event while the block runs; behind it they are `KeyboardInterrupt`.

    An exception must not be raised in a callback: it would have to cross the builder's C++ frames.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    previous = {
        number: signal.signal(number, lambda number, frame: interrupted.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if interrupted.is_set():
            raise KeyboardInterrupt
