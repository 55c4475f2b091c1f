"""The progress of commands on stderr: a spinner on a terminal, and lines in a file or a pipe."""

from __future__ import annotations

import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType

from sinkprune.contract.checks.format_value import duration, format_value
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.reports.progress import OnProgress, unreported

SECONDS = 10.0
"""The time between two lines. The first comes after a fifth of it."""
_BLOCKED_SECONDS = 1.0
"""How long the end of a block waits for a line that is being written."""
# The rate of the first steps is that of a warm-up.
_ENOUGH_SHARE, _ENOUGH_STEPS, _ENOUGH_SECONDS = 0.02, 3, 10.0


class ProgressLines:
    """Writes lines to stderr while its block runs, after two seconds and then every ten: what is done, the rate, and
    the time left.

        with ProgressLines("measuring", total=40) as lines:
            lines.update("retain-64", advance=1)

    The end of the block writes a line too if the last line is five seconds old, so that several blocks of nine
    seconds are not silent. In a command that is `starting`, the first line comes earlier if the command wrote none
    for as long. Any thread may call the methods.
    """

    def __init__(
        self,
        what: str,
        total: float | None = None,
        unit: str = "",
        seconds: float | None = None,
        *,
        beside_bar: bool = False,
    ) -> None:
        """Name the work `what`. `total` is the number of its steps, each a `unit`; None if it is unknown.

        With `beside_bar`, a terminal shows a bar or a spinner, and no line is written to it.
        """
        self._what, self._total, self._unit, self._done, self._updates = what, total, unit, 0.0, 0
        self._seconds = SECONDS if seconds is None else seconds
        self._began = self._written_at = time.monotonic()
        self._beside_bar = beside_bar
        self._count = 0
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._command = _STARTED.get()

    def __enter__(self) -> ProgressLines:
        """Begin to count the seconds. The lines of the command's start end."""
        if self._command:
            self._command.end()
        if self._shown:
            # If threads run out, the command goes on without lines. `Thread.start` would wait for the thread, and for
            # good where it has too little memory to begin.
            with suppress(RuntimeError):
                start_new_thread(self._run, ())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the lines. Write a last one if the block succeeded after a long silence."""
        silent = self._ended.is_set()
        self.end()
        if not self._shown:
            # The bar was seen until now.
            self._note_line(time.monotonic())
        if silent:
            return
        if error is None and time.monotonic() - self._written_at >= self._seconds / 2 and self._shown:
            self._write()

    def end(self) -> None:
        """Write no further lines: the block's own output shows that it goes on. A line that has begun comes first."""
        self._ended.set()
        # A stderr that nobody reads blocks the thread, and must not block the command.
        if self._writing.acquire(timeout=_BLOCKED_SECONDS):
            self._writing.release()

    def update(
        self, what: str | None = None, *, advance: float = 0, done: float | None = None, total: float | None = None
    ) -> None:
        """Set the name of the work, the steps that are `done` (or add `advance` to them), and their `total`."""
        self._what = self._what if what is None else what
        before, self._done = self._done, self._done + advance if done is None else done
        self._updates += self._done > before
        self._total = self._total if total is None else total

    def line(self, seconds: float) -> str:
        """Return the line at `seconds` after the start, without a line end."""
        if not (self._done or self._total):
            return escaped(f"{self._what}: {duration(seconds)}")
        unit = f" {self._unit}" if self._unit else ""
        of = "" if self._total is None else f" of {_rounded(self._total)}"
        text = f"{self._what}: {_rounded(self._done)}{of}{unit} in {duration(seconds)}"
        if not self._done:
            return escaped(text)
        rate = self._done / seconds
        if self._total is None:
            return escaped(f"{text}, {rate:.3g}{unit} a second")
        several = self._updates >= _ENOUGH_STEPS and seconds >= _ENOUGH_SECONDS
        if several or (seconds >= 1 and self._done >= _ENOUGH_SHARE * self._total):
            text += f", {rate:.3g}{unit} a second, {duration(max(0.0, self._total - self._done) / rate)} left"
        return escaped(text)

    def restart(self, what: str) -> None:
        """Name the next part of the work, and count its steps and its time from now on."""
        self._what, self._done, self._updates, self._began = what, 0.0, 0, time.monotonic()
        self._total = None

    def report(self, what: str, done: float, total: float, unit: str) -> None:
        """Take the progress of work in several parts: an `OnProgress`."""
        if what != self._what:
            self.restart(what)
        self._unit = unit
        self.update(done=done, total=total)

    @property
    def present(self) -> str:
        """The line of this moment, without a line end."""
        return self.line(time.monotonic() - self._began)

    @property
    def _shown(self) -> bool:
        return not (self._beside_bar and sys.stderr.isatty())

    def _run(self) -> None:
        wait = self._seconds / 5
        if self._command:
            wait = min(wait, self._command._next_line_in)
        while not self._ended.wait(wait):
            with self._writing:
                if not self._ended.is_set():
                    self._write()
            wait = self._seconds

    @property
    def _next_line_in(self) -> float:
        """The seconds until the next line is due, 0 if it is overdue."""
        wait = self._seconds if self._count else self._seconds / 5
        return max(0.0, self._written_at + wait - time.monotonic())

    def _note_line(self, now: float) -> None:
        self._written_at, self._count = now, self._count + 1
        if self._command:
            self._command._note_line(now)

    def _write(self) -> None:
        self._note_line(time.monotonic())
        # stderr may be closed.
        with suppress(OSError, ValueError):
            sys.stderr.write(self.line(self._written_at - self._began) + "\n")
            sys.stderr.flush()


_STARTED: ContextVar[ProgressLines | None] = ContextVar("_STARTED", default=None)
"""The lines of the start of the command that runs."""


@contextmanager
def starting() -> Iterator[None]:
    """Write lines to stderr until the first `ProgressLines` or `status` of a command begins, or the block ends.

    The block imports the command's packages, which takes seconds on a slow machine, and then runs the command. Parts
    of the command that are each shorter than two seconds write a line if the command has written none for as long.
    """
    with ProgressLines("starting") as lines:
        token = _STARTED.set(lines)
        try:
            yield
        finally:
            _STARTED.reset(token)


def end_start_lines() -> None:
    """Write no further lines of the command's start: an error message is the last line of a command."""
    if lines := _STARTED.get():
        lines.end()


@contextmanager
def status(text: str) -> Iterator[OnProgress]:
    """Show `text` on stderr while the block runs: a spinner on a terminal, else a line every ten seconds.

    Yields a function that adds what is done, the rate, and the time left.
    """
    if not sys.stderr.isatty():
        with ProgressLines(text) as lines:
            yield lines.report
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    shape = "dots" if console.encoding.startswith("utf") else "line"
    with ProgressLines(text, beside_bar=True) as lines, console.status(Text(escaped(text)), spinner=shape) as spinner:

        def report(what: str, done: float, total: float, unit: str) -> None:
            lines.report(what, done, total, unit)
            spinner.update(Text(lines.present))

        yield report


@contextmanager
def shown_progress(text: str, progress: bool | OnProgress) -> Iterator[OnProgress]:
    """Yield the function for the progress of the block, by the argument `progress` of a Python function.

    True shows what `status` shows for `text`, False nothing. A function is yielded as it is. Raises `TypeError` for
    anything else.
    """
    if progress is True:
        with status(text) as report:
            yield report
    elif progress is False:
        yield unreported
    else:
        if not callable(progress):
            raise TypeError(f"progress is {format_value(progress)}, expected True, False or a function.")
        yield progress


def _rounded(count: float) -> str:
    """Return a whole number as it is, and a fraction with one digit; below a hundredth, 0."""
    if count == int(count) or count < 0.01:
        return f"{count:.0f}"
    return f"{count:.1f}" if count >= 1 else f"{count:.1g}"
