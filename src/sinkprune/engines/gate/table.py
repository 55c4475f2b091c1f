"""The gate's report on a terminal: one row an engine, with the output that is nearest to its limit."""

from __future__ import annotations

from rich.table import Table

from sinkprune.contract.checks.terminal import escaped
from sinkprune.engines.gate.report import GateReport, OutputReport
from sinkprune.runtime.commands.table_console import TableConsole

_ALIGNED_LEFT = ("engine", "in", "output", "method", "budget", "")


def print_report(report: GateReport) -> None:
    """Write the report to stdout."""
    console = TableConsole()
    console.print(
        f"{escaped(report.engines)}: {report.target} {escaped(report.library_version)}, {report.precision}, weights "
        f"{report.weights.name}, computes in {report.compute}",
        highlight=False,
        markup=False,
    )
    table = _table("engine", "in", "calls", "output", "median", "limit", "worst", "limit", "ties", "")
    for graph, own in report.graphs.items():
        name = max(own.outputs, key=lambda output: _share(own.outputs[output]))
        output = own.outputs[name]
        table.add_row(
            escaped(graph),
            own.rounding,
            str(own.calls),
            escaped(name),
            _figure(output.typical),
            f"{output.typical_limit:g}",
            _figure(output.worst),
            f"{output.worst_limit:g}",
            str(sum(each.ties for each in own.outputs.values())),
            "passed" if own.refused is None else "REFUSED",
        )
    console.print(table)
    if report.texts:
        table = _table("method", "budget", "same tokens", "gap", "limit", "kept alike %", "")
        for text in report.texts:
            table.add_row(
                escaped(text.method),
                escaped(text.budget),
                f"{text.same_tokens} of {text.tokens}",
                _figure(text.gap),
                "-" if text.gap_limit is None else f"{text.gap_limit:g}",
                f"{100 * text.kept_alike:.1f}",
                "passed" if text.passed else "REFUSED",
            )
        console.print(table)


def _share(output: OutputReport) -> float:
    """How much of its limit an output takes."""
    if output.typical is None or output.worst is None:
        return float("inf")
    if output.kind == "indices":
        return float("inf") if output.worst else 0.0
    return max(output.typical / output.typical_limit, output.worst / output.worst_limit)


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _ALIGNED_LEFT else "right", no_wrap=True)
    return table


def _figure(number: float | None) -> str:
    return "not finite" if number is None else f"{number:.2g}"
