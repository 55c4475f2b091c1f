"""The console and the tables of commands that measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkprune.contract.checks import counted, escaped
from sinkprune.contract.report import FEWEST_OF_P95, EngineHeader, ReportHeader, Spread

TEXT_WIDTH = 100
"""The columns of text, and the most of a profile's tables."""
USUAL_REPEAT = 5
"""The default for `--repeat`."""


class TableConsole(Console):
    """Prints on standard output, by default wider than most terminals: a wrapped row is worse than a long one."""

    def __init__(self, width: int = 250, *, soft_wrap: bool = True) -> None:
        """With `width` in columns; `soft_wrap` leaves longer lines to the terminal."""
        super().__init__(width=width, soft_wrap=soft_wrap, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print without blanks at the ends of lines, which rich adds to fill a table's last column."""
        with self.capture() as printed:
            super().print(*objects, **options)
        self.file.write("\n".join(line.rstrip(" ") for line in printed.get().split("\n")))

    def print_text(self, text: str) -> None:
        """Print untrusted text on lines of at most `TEXT_WIDTH` columns."""
        self.print(Text(fill(escaped(text), TEXT_WIDTH, break_long_words=False)))

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, which `run_command` handles; rich would exit with 1."""
        raise BrokenPipeError

    def print_head(self, report: ReportHeader, measured: str) -> None:
        """Print the model, the machine and the lengths of a report's requests, and what was `measured`."""
        lengths = f"{report.prompt_tokens} text tokens, {report.new_tokens} new tokens"
        self.print_machine(report, f"{lengths}; {measured}")

    def print_machine(self, report: EngineHeader, measured: str) -> None:
        """Print the model and the machine of a report, and what was `measured`."""
        self.print_text(
            f"{report.model}, {report.weights.beside(report.precision)}, {report.backend}, "
            f"{counted(report.threads, 'thread')}, {report.machine}"
        )
        self.print_text(measured)


def few_note(repeat: int) -> str:
    """Return a note about the 95th percentile of few measurements, and nothing for many."""
    return f" (of fewer than {FEWEST_OF_P95}, p95 is close to the slowest)" if repeat < FEWEST_OF_P95 else ""


def noise_note(what: str, repeat: int, spreads: Mapping[str, Spread]) -> str:
    """Return how far apart the measurements of `what` are, and which rows have no certain order, by their names."""
    if repeat == 1:
        return "one round does not show how much runs differ, so speed-ups may be noise; more rounds: --repeat"
    widest = max(spread.p95 / spread.median - 1 for spread in spreads.values())
    note = f"{what} differs by up to {100 * widest:.0f} % from run to run"
    ordered = sorted(spreads.items(), key=lambda item: item[1].median)
    unclear = [f"{name} or {slower}" for (name, own), (slower, after) in pairwise(ordered) if own.p95 > after.median]
    if not unclear:
        return f"{note}; more runs narrow it: --repeat"
    pairs = ", ".join(unclear)
    return f"warning: {note}, so it is not certain which is quicker: {pairs}; more runs may show it: --repeat"


def make_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table with left-aligned columns, then right-aligned ones, by headings of one line or more."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in left:
        table.add_column(Text(escaped(heading, keep="\n")), no_wrap=True, vertical="bottom")
    for heading in right:
        text = Text(escaped(heading, keep="\n"))
        table.add_column(text, justify="right", no_wrap=True, vertical="bottom")
    return table


def plain_text(text: str) -> Text:
    """Return untrusted text for rich's tables, in which markup and control characters have no effect."""
    return Text(escaped(text))


def median_text(spread: Spread | None) -> str:
    """Return the median with three digits or so; "-" for None."""
    return "-" if spread is None else f"{spread.median:.{_digits(spread)}f}"


def spread_text(spread: Spread | None) -> str:
    """Return the median, with the 95th percentile in brackets; "-" for None."""
    return "-" if spread is None else f"{median_text(spread)} ({spread.p95:.{_digits(spread)}f})"


def _digits(spread: Spread) -> int:
    return 0 if spread.median >= 100 else 1
