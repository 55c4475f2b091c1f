"""Progress of a build on a terminal, and its end by Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.progress import TaskID

from sinkprune.contract.command_line.bars import new_bars
from sinkprune.contract.command_line.command import INTERRUPTS


class BuildProgress:
    """Callbacks for the progress of a build: its graphs, and the nested phases of one graph. Shows nothing itself.

    Any thread may call them.
    """

    def report(self, line: str) -> None:
        """Show a line, for example what the build needs and what is free."""

    def part(self, what: str, done: float, total: float, unit: str) -> None:
        """Report work besides graphs: an `OnProgress`."""

    def graph(self, name: str, number: int, total: int, work: str = "building engines") -> None:
        """Start the graph `name`, after `number` of `total` graphs. `work` is what is done with the graphs."""

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        """Start the phase `name`, within the phase `parent` if there is one."""

    def step_complete(self, name: str, step: int) -> None:
        """Complete the step `step`, counted from 0, of the phase `name`."""

    def phase_finish(self, name: str) -> None:
        """End the phase `name`, completed or not."""


SILENT = BuildProgress()
"""Shows nothing of a build."""


class TerminalProgress(BuildProgress):
    """Shows a build on a terminal's stderr while its block runs: a bar of graphs and a bar for each running phase."""

    def __init__(self) -> None:
        self._bars = new_bars()
        self._graphs = self._bars.add_task("reading", total=None)
        self._phases: dict[str, TaskID] = {}
        self._depths: dict[str, int] = {}

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def report(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def part(self, what: str, done: float, total: float, unit: str) -> None:
        self._bars.update(self._graphs, description=what, completed=done, total=total or None)

    def graph(self, name: str, number: int, total: int, work: str = "building engines") -> None:
        text = f"{work}: {number} of {total} graphs, {name}"
        self._bars.update(self._graphs, description=text, completed=number, total=total)

    def phase_start(self, name: str, parent: str | None, steps: int) -> None:
        self._depths[name] = self._depths.get(parent or "", 0) + 1
        self._phases[name] = self._bars.add_task("  " * self._depths[name] + name, total=steps)

    def step_complete(self, name: str, step: int) -> None:
        if name in self._phases:
            self._bars.update(self._phases[name], completed=step + 1)

    def phase_finish(self, name: str) -> None:
        if name in self._phases:
            self._bars.remove_task(self._phases.pop(name))


def new_monitor(trt: Any, progress: BuildProgress, interrupted: threading.Event) -> Any:
    """Return an `IProgressMonitor` of `trt` that calls `progress`, and ends the build once `interrupted` is set.

    The monitor must outlive the builder.
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
    """Yield an event that `INTERRUPTS` set, unless ignored. After the block a set event raises `KeyboardInterrupt`.

    A callback must not raise an exception, which would have to cross the builder's C++ frames.
    """
    interrupted, received = threading.Event(), list[int]()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        interrupted.set()

    previous = {
        number: signal.signal(number, note) for number in INTERRUPTS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield interrupted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if interrupted.is_set():
            # The command's handler raises the error, and ignores a second Ctrl-C during the clean-up.
            signal.raise_signal(received[0])
            raise KeyboardInterrupt
