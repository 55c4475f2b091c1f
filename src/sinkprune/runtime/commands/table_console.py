"""The console and the tables of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.reports.rate_report import RateReport
from sinkprune.contract.reports.report import ProfileReport
from sinkprune.runtime.commands import plain_text


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

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, which `run_command` handles; rich would exit with 1."""
        raise BrokenPipeError

    def print_head(self, report: ProfileReport | RateReport, measured: str) -> None:
        """Print the model, the machine and the lengths of a report's requests, and what was `measured`."""
        self.print(
            f"{escaped(report.model)}, {report.precision}, {report.backend}, {counted(report.threads, 'thread')}, "
            f"{report.machine}\n{report.prompt_tokens} text tokens, {report.new_tokens} new tokens; {measured}",
            markup=False,
        )


def make_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Return an empty table with left-aligned columns, then right-aligned ones, by their headings."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in left:
        table.add_column(plain_text(heading), no_wrap=True)
    for heading in right:
        table.add_column(plain_text(heading), justify="right", no_wrap=True)
    return table
