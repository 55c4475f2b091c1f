"""The console and the tables of commands."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.reports.rate_report import RateReport
from sinkprune.contract.reports.report import Report


class TableConsole(Console):
    """Prints on standard output, by default wider than most terminals: a wrapped row is worse than a long one."""

    def __init__(self, width: int = 250, *, soft_wrap: bool = True) -> None:
        """With `width` in columns; `soft_wrap` leaves longer lines to the terminal."""
        super().__init__(width=width, soft_wrap=soft_wrap, highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, which `run_command` handles; rich would exit with 1."""
        raise BrokenPipeError

    def print_head(self, report: Report | RateReport, measured: str) -> None:
        """Print the model, the machine and the lengths of a report's requests, and what was `measured`."""
        self.print(
            f"{escaped(report.model)}, {report.precision}, {report.backend}, {report.threads} threads, "
            f"{report.machine}\n{report.prompt_tokens} text tokens, {report.new_tokens} new tokens; {measured}",
            markup=False,
        )


def budget_table(headings: Sequence[str]) -> Table:
    """Return a table with a row for each budget: its name on the left, and columns of figures."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("budget", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
