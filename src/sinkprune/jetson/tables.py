"""Prints a report to the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.text import Text

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.command_line.table_console import TableConsole, plain_text
from sinkprune.contract.system.memory_need import gigabytes
from sinkprune.jetson.boards import Board
from sinkprune.jetson.findings import Finding
from sinkprune.jetson.host.machine import Machine
from sinkprune.jetson.host.power_mode import ClockFrequency
from sinkprune.jetson.host.python_environment import Library
from sinkprune.jetson.model_tables import (
    budget_table,
    build_table,
    heading,
    legend,
    overview,
    recommendation,
)
from sinkprune.jetson.report import DoctorReport

_WIDTH = 100
_FIT = "sinkprune-run --fit pad shows it all (docs/pictures.md)"
_MAX_PIXELS = "for small things export with a larger --max-pixels (docs/pictures.md)"
_UNKNOWN = "-"


def print_report(report: DoctorReport) -> None:
    """Print a report."""
    console = TableConsole(_WIDTH, soft_wrap=False)
    rows = _machine_rows(report.machine) if report.machine else iter(())
    for name, text in (*rows, *_board_rows(report.board_facts, report)):
        console.print(Text.assemble((f"{name:<14}", "bold"), plain_text(text)), soft_wrap=True)
    for finding in report.findings:
        console.print(_finding(finding), soft_wrap=True)
    if report.machine and not report.findings:
        console.print("No problems found.")
    if report.overview:
        console.print()
        console.print(overview(report.models, report.recommendations))
    for model in () if report.overview else report.models:
        console.print()
        console.print(plain_text(heading(model)), style="bold", soft_wrap=True)
        for unseen, do in ((model.seen_part, _FIT), (model.seen_smaller, _MAX_PIXELS)):
            if unseen:
                console.print(_finding(Finding(False, unseen, do)), soft_wrap=True)
        console.print(budget_table(model))
        if any(form.build for form in model.forms):
            console.print()
            console.print(build_table(model))
    console.print()
    for line in legend(report):
        console.print(plain_text(line), style="dim")
    _print_advice(console, report)


def _print_advice(console: TableConsole, report: DoctorReport) -> None:
    """Print recommendations, and either what to do first or the commands to run next."""
    if report.recommendations and not report.overview:
        console.print("\nRecommended:", style="bold")
        for found in report.recommendations:
            console.print(plain_text(f"  {recommendation(found, report)}"), soft_wrap=True)
    for title, lines in (("First:", report.first), ("Next:", report.next)):
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(plain_text(f"  {line}"), soft_wrap=True)
    if report.first and not report.next:
        console.print("  Then run sinkprune-doctor again: it prints the commands.")


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "machine", machine.model or f"no Jetson: {machine.processor}, {machine.python.architecture}"
    if machine.chip:
        yield "board", machine.board or f"{machine.chip}, unknown module"
    yield (
        "system",
        ", ".join(filter(None, (machine.system, machine.kernel and f"Linux {machine.kernel}"))) or _UNKNOWN,
    )
    installed = machine.jetpack
    if machine.chip:
        yield "Jetson Linux", installed.l4t or _UNKNOWN
        yield "JetPack", installed.package or _UNKNOWN
    if machine.chip or installed.cuda or installed.tensorrt:
        pythons = f", for Python {', '.join(installed.tensorrt_python)}" if installed.tensorrt_python else ""
        yield "CUDA", installed.cuda or _UNKNOWN
        yield "TensorRT", (installed.tensorrt or _UNKNOWN) + pythons
    python = machine.python
    kind = "the system's" if not python.virtual else "virtual, sees the system's packages"
    kind = kind if python.sees_system else "virtual, apart from the system's packages"
    yield "Python", f"{python.version} ({kind}) {python.executable}"
    yield "libraries", ", ".join(_library(name, found) for name, found in python.libraries.items()) or "none"
    if machine.chip:
        mode = machine.power_mode
        known = f" of {', '.join(mode.modes)}" if mode and mode.modes else ""
        yield "power mode", f"{mode.name or mode.id}{known}" if mode else _UNKNOWN
    if machine.cpu_clock:
        yield "CPU clock", _clock(machine.cpu_clock)
    if machine.gpu_clock:
        yield "GPU clock", _clock(machine.gpu_clock)
    yield "processor", f"{machine.processor}, {counted(machine.cores, 'core')} for this process"
    yield "instructions", machine.instructions or _UNKNOWN
    memory = [
        f"{gigabytes(machine.memory_bytes)}" if machine.memory_bytes else _UNKNOWN,
        f"{gigabytes(machine.free_bytes)} free" if machine.free_bytes else "",
    ]
    yield "memory", ", ".join(filter(None, memory))
    swap = [f"{one.place} {gigabytes(one.bytes)}{' (zram)' if one.compressed else ''}" for one in machine.swap]
    yield "swap", ", ".join(swap) or "none"
    free = gigabytes(machine.disk_free_bytes) if machine.disk_free_bytes is not None else _UNKNOWN
    yield "disk", f"{free} free at {machine.disk}"


def _board_rows(board: Board | None, report: DoctorReport) -> Iterator[tuple[str, str]]:
    if board is None:
        return
    yield "module", f"{board.module}, sm_{board.sm}"
    int8 = f", {board.int8_tops:g} TOPS int8" if board.int8_tops else ""
    figures = f"{board.memory_gb} GB, {board.gb_per_s:g} GB/s, {board.fp16_tflops:g} TFLOP/s fp16{int8}"
    yield "power modes", ", ".join(board.power_modes)
    yield "datasheet", f"{figures} (dense, fastest power mode; verify before quoting)"
    if report.machine is None and report.usable_bytes:
        yield "for programs", f"about {gigabytes(report.usable_bytes)}, without a desktop"


def _finding(finding: Finding) -> Text:
    mark, style = ("stop", "bold red") if finding.stops else ("note", "yellow")
    return Text.assemble((f"{mark}: ", style), plain_text(finding.found), "\n      ", plain_text(finding.do))


def _clock(clock: ClockFrequency) -> str:
    parts = [f"{clock.now} MHz" if clock.now else "", f"of {clock.most}" if clock.most else "", clock.governor or ""]
    return " ".join(filter(None, parts)) or _UNKNOWN


def _library(name: str, library: Library) -> str:
    # Users do not need a build's suffix.
    version = re.split("[-+]", library.version)[0] if library.version else "does not import"
    return f"{name} {version}"
