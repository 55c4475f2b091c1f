"""Ctrl-C ends an answer or a measurement early, and never replaces an earlier result by a part of a new one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.progress import progress_bar
from sinkprune.contract.command_line.written_files import write_each
from sinkprune.runtime.commands import Options, write_report
from sinkprune.runtime.stream import Stream

Given = TypeVar("Given")
R = TypeVar("R")
NO_COSTS = "no costs were kept: they need all rounds of the measurement."
NO_QUESTION = "no whole question was measured, so nothing was kept."


@contextmanager
def ended_by_interrupt(stream: Stream) -> Iterator[None]:
    """End `stream` after the present token at the first Ctrl-C of the block; the second raises `KeyboardInterrupt`.

    The answer then has the finish reason `cancelled`. Without effect where Ctrl-C is ignored, and outside of the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        stream.cancel()

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def explain_interrupt(kept: str) -> Iterator[None]:
    """Raise Ctrl-C in the block with the sentence `kept` about what was kept, unless it has one."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or kept) from interrupt


def until_interrupt(
    measure: Callable[[Callable[..., None]], object], total: int, unit: str
) -> KeyboardInterrupt | None:
    """Call `measure` with a bar of progress; returns Ctrl-C where that ended it.

    `measure` takes a function that it calls with the name of what was measured, and the number of new steps (default:
    one). There are `total` steps, each a `unit`.
    """
    try:
        with progress_bar("measuring", total, unit) as count:
            measure(lambda name, steps=1: count(f"measuring {name}", steps))
    except KeyboardInterrupt as interrupt:
        return interrupt
    return None


def write_measured(
    options: Options,
    report: R,
    plot: Callable[[R, str], bytes],
    in_words: Callable[[], object],
    notes: Sequence[str],
    interrupted: str,
    *,
    first: Callable[[Options], object] = lambda options: None,
    last: Callable[[], object] = lambda: None,
    outputs: Sequence[str] = ("json", "plot"),
) -> None:
    """Write a report as `write_report` does, with the keys `interrupted` and `notes`.

    `interrupted` is what the report counts after Ctrl-C, else "". After Ctrl-C the files of the options `outputs`
    replace none that are there, and this raises `KeyboardInterrupt` in the end. `first` is called before the report,
    with the options after their files were renamed, and `last` after it.
    """
    moved, earlier = beside_earlier(options, *outputs) if interrupted else (options, "")
    more = {"interrupted": interrupted or None, "notes": notes}
    write_each(lambda: first(moved), lambda: write_report(moved, report, plot, in_words, more), last)
    if interrupted:
        raise KeyboardInterrupt(interrupted + earlier)


def interrupted_warnings(counts: str) -> tuple[str, ...]:
    """Return the warning of a report on a part of a measurement, and none where `counts`, what it counts, is ""."""
    return (f"Interrupted: {counts}",) if counts else ()


def beside_earlier(options: Given, *names: str) -> tuple[Given, str]:
    """Return a copy of `options` whose outputs `names` replace no file that is there, and a sentence about them.

    The results of an interrupted measurement go next to an earlier file: `x.interrupted.json` next to `x.json`, and
    `x.interrupted-2.json` next to both.
    """
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    moved: dict[str, Path] = {
        name: _free_name(path) for name, path in given.items() if path is not None and path.exists()
    }
    if not moved:
        return options, ""
    listed = ", ".join(f"'{escaped(str(path))}'" for path in moved.values())
    return type(options)(**{**vars(options), **moved}), f" Earlier files stay; these results are in {listed}."


def _free_name(path: Path) -> Path:
    """Return a name next to `path` that no file has."""
    endings = chain([""], (f"-{number}" for number in count(2)))
    names = (path.with_name(f"{path.stem}.interrupted{ending}{path.suffix}") for ending in endings)
    return next(name for name in names if not name.exists())
