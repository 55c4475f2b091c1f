"""`sinkprune-profile --rate`: its options, and what it prints."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.errors import UsageError
from sinkprune.contract.reports.rate_report import RateReport
from sinkprune.runtime.commands import plain
from sinkprune.runtime.commands.power import power_line
from sinkprune.runtime.commands.table_console import TableConsole
from sinkprune.runtime.profiling.frame_clock import DURATION, RATE, FrameClock, frame_clock

DURATION_SECONDS = 60.0
FRAMES = {"--frames": "with --rate: a folder of pictures, of which each frame shows the next"}
"""What may stand in the place of images, for `new_parser`."""


def add_rate_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `RateOptions` but for `--frames` and `--repeat`."""
    add = parser.add_argument
    add("--rate", type=RATE, metavar="HZ", help="ask at a camera's steady rate instead, each budget for --duration")
    add("--duration", type=DURATION, metavar="SECONDS", help=f"for --rate (default: {DURATION_SECONDS:g})")


@dataclass(kw_only=True)
class RateOptions:
    """The options of `add_rate_options`."""

    frames: Path | None
    rate: float | None
    duration: float | None
    repeat: int | None


def wanted_camera(options: RateOptions) -> FrameClock | None:
    """What sends frames; None without --rate. Raises `UsageError` for options that do not go together."""
    if options.rate is None:
        for name in ("frames", "duration"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for frames at a steady rate. Add --rate, or leave it out.")
        return None
    if options.repeat is not None:
        raise UsageError("--repeat counts rounds, and --rate goes by time. Leave --repeat out, and give --duration.")
    return frame_clock(options.rate, DURATION_SECONDS if options.duration is None else options.duration)


def print_rates(report: RateReport) -> None:
    """A table with a row for each budget, and what was told of the machine."""
    console = TableConsole()
    console.print(
        f"{escaped(report.model)}, {report.precision}, {report.backend}, {report.threads} threads, {report.machine}\n"
        f"{report.prompt_tokens} text tokens, {report.new_tokens} new tokens; {report.rate_hz:g} frames a second for "
        f"{report.duration_s:g} s; milliseconds from a frame's arrival to its whole answer",
        highlight=False,
        markup=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    headings = ["budget", "visual", "frames", "missed", "p50", "p95", "p99", "max", "jitter", "busy p50"]
    for heading in [*headings, *(["J a frame", "W"] if report.power else [])]:
        table.add_column(heading, justify="left" if heading == "budget" else "right", no_wrap=True)
    for name, budget in report.rates.items():
        late, energy = budget.latency_ms, budget.energy
        joules = [f"{energy.joules_per_frame:.3g}", f"{energy.watts:.2f}"] if energy else ["-", "-"]
        table.add_row(
            plain(name),
            f"{budget.visual_tokens}>{budget.kept_after_sanitizer}>{budget.tokens_per_layer[-1]}",
            f"{budget.frames}",
            f"{budget.missed}",
            *(f"{value:.1f}" for value in (late.p50, late.p95, late.p99, late.maximum, late.jitter)),
            f"{budget.busy_ms.p50:.1f}",
            *(joules if report.power else []),
        )
    console.print(table)
    if any(budget.answered < 100 for budget in report.rates.values()):
        console.print("Of fewer than 100 answers, p99 is close to the slowest.")
    for name, budget in report.rates.items():
        if budget.busy_ms.p50 > 1000 / report.rate_hz:
            fastest = 1000 / budget.busy_ms.p50
            console.print(plain(f"{name}: at most {fastest:.2g} frames a second here: a request outlasts a frame"))
    if report.power is not None:
        console.print(plain(power_line(report.power)))
    console.print(plain(_conditions(report)))


def _conditions(report: RateReport) -> str:
    """Where temperatures and clocks began and ended, and how far they went."""
    told = []
    for unit, lines in (("C", report.conditions.temperatures_c), ("MHz", report.conditions.clocks_mhz)):
        for name, values in lines.items():
            known = [value for value in values if value is not None]
            told.append(f"{name} {known[0]:.0f} to {known[-1]:.0f} {unit} ({min(known):.0f} to {max(known):.0f})")
    return "; ".join(told) if told else "no temperature or clock can be read here"
