"""A report for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkprune.contract.memory_need import gigabytes
from sinkprune.jetson.boards import Board
from sinkprune.jetson.findings import Finding
from sinkprune.jetson.fit import BudgetFit, ModelFit
from sinkprune.jetson.machine import Machine
from sinkprune.jetson.power_mode import Clock
from sinkprune.jetson.python_environment import Library
from sinkprune.jetson.report import Report
from sinkprune.runtime.commands import plain

# Wider than most terminals are set to by default: a wrapped row is worse than a long one.
_WIDTH = 250
_NOT_TOLD = "-"


def print_report(report: Report) -> None:
    """Write a report to stdout."""
    console = Console(width=_WIDTH, soft_wrap=True, highlight=False)
    rows = _machine_rows(report.machine) if report.machine else iter(())
    for name, told in (*rows, *_board_rows(report.board_facts, report)):
        console.print(Text.assemble((f"{name:<14}", "bold"), plain(told)))
    for finding in report.findings:
        console.print(_finding(finding))
    if report.machine and not report.findings:
        console.print("Nothing was found to stand in the way.")
    for model in report.models:
        console.print()
        console.print(plain(_heading(model)), style="bold")
        console.print(_budgets(model))
    console.print()
    for line in _legend(report):
        console.print(plain(line), style="dim")
    if report.next:
        console.print("\nNext:", style="bold")
        for command in report.next:
            console.print(plain(f"  {command}"))


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "machine", machine.model or f"no Jetson: {machine.processor}, {machine.python.architecture}"
    if machine.chip:
        yield "board", machine.board or f"{machine.chip}, of a module that is not known"
    yield (
        "system",
        ", ".join(filter(None, (machine.system, machine.kernel and f"Linux {machine.kernel}"))) or _NOT_TOLD,
    )
    installed = machine.jetpack
    if machine.chip:
        yield "Jetson Linux", installed.l4t or _NOT_TOLD
        yield "JetPack", installed.package or _NOT_TOLD
    if machine.chip or installed.cuda or installed.tensorrt:
        pythons = f", for Python {', '.join(installed.tensorrt_python)}" if installed.tensorrt_python else ""
        yield "CUDA", installed.cuda or _NOT_TOLD
        yield "TensorRT", (installed.tensorrt or _NOT_TOLD) + pythons
    python = machine.python
    kind = "the system's" if not python.virtual else "virtual, sees the system's packages"
    kind = kind if python.sees_system else "virtual, apart from the system's packages"
    yield "Python", f"{python.version} ({kind}) {python.executable}"
    yield "libraries", ", ".join(_library(name, found) for name, found in python.libraries.items()) or "none"
    if machine.chip:
        mode = machine.power_mode
        known = f" of {', '.join(mode.modes)}" if mode and mode.modes else ""
        yield "power mode", f"{mode.name or mode.id}{known}" if mode else _NOT_TOLD
    if machine.cpu_clock:
        yield "CPU clock", _clock(machine.cpu_clock)
    if machine.gpu_clock:
        yield "GPU clock", _clock(machine.gpu_clock)
    yield "processor", f"{machine.processor}, {machine.cores} cores for this process"
    yield "instructions", machine.instructions or _NOT_TOLD
    memory = [
        f"{gigabytes(machine.memory_bytes)}" if machine.memory_bytes else _NOT_TOLD,
        f"{gigabytes(machine.free_bytes)} free" if machine.free_bytes else "",
    ]
    yield "memory", ", ".join(filter(None, memory))
    swap = [f"{one.place} {gigabytes(one.bytes)}{' (zram)' if one.compressed else ''}" for one in machine.swap]
    yield "swap", ", ".join(swap) or "none"
    free = gigabytes(machine.disk_free_bytes) if machine.disk_free_bytes is not None else _NOT_TOLD
    yield "disk", f"{free} free at {machine.disk}"


def _board_rows(board: Board | None, report: Report) -> Iterator[tuple[str, str]]:
    if board is None:
        return
    yield "module", f"{board.module}, sm_{board.sm}"
    int8 = f", {board.int8_tops:g} TOPS int8" if board.int8_tops else ""
    figures = f"{board.memory_gb} GB, {board.gb_per_s:g} GB/s, {board.fp16_tflops:g} TFLOP/s fp16{int8}"
    yield "datasheet", f"{figures} (dense; verify before quoting)"
    yield "power modes", ", ".join(board.power_modes)
    if report.machine is None and report.usable_bytes:
        yield "for programs", f"about {gigabytes(report.usable_bytes)}, without a desktop"


def _finding(finding: Finding) -> Text:
    mark, style = ("stop", "bold red") if finding.stops else ("note", "yellow")
    return Text.assemble((f"{mark}: ", style), plain(finding.found), "\n      ", plain(finding.do))


def _heading(model: ModelFit) -> str:
    width, height = model.picture
    return (
        f"{model.name}: {model.visual_tokens} visual tokens of a {width}x{height} picture, {model.prompt_tokens} of "
        f"prompt, {model.new_tokens} of answer, on {model.backend}{_encoder(model)}"
    )


def _encoder(model: ModelFit) -> str:
    first = next(iter(model.forms[0].budgets.values()))
    return f"; vision tower at least {first.bounds.encoder_flops_ms:.0f} ms" if first.bounds else ""


def _budgets(model: ModelFit) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("budget", no_wrap=True)
    for heading in ("visual", "TFLOP"):
        table.add_column(heading, justify="right", no_wrap=True)
    for form in model.forms:
        own = "*" if form.exported else ""
        bounded = next(iter(form.budgets.values())).bounds is not None
        table.add_column(f"{form.decoder_form}{own}: GB", justify="right", no_wrap=True)
        for heading in ("prefill ms", "a token ms") if bounded else ():
            table.add_column(heading, justify="right", no_wrap=True)
    for name, rows in model.rows.items():
        visual = [model.visual_tokens, rows.tokens_per_layer[0], rows.tokens_per_layer[-1]]
        cells: list[Text] = [plain(name), Text(">".join(map(str, visual))), Text(f"{rows.prefill_flops / 1e12:.2f}")]
        for form in model.forms:
            cells += _cells(form.budgets[name])
        table.add_row(*cells)
    return table


def _cells(fit: BudgetFit) -> list[Text]:
    needed = f"{fit.memory_bytes / 1e9:.1f}"
    style = "red" if fit.fits is False else "green" if fit.fits else ""
    cells = [Text(f"{needed}!" if fit.fits is False else f"{needed} ", style=style)]
    if fit.bounds:
        prefill = f"{fit.bounds.prefill_ms:.0f}{'w' if fit.bounds.by_weights else ' '}"
        cells += [Text(prefill), Text(f"{fit.bounds.token_ms:.0f}")]
    return cells


def _legend(report: Report) -> Iterator[str]:
    """What the columns of the models' tables mean."""
    most = f"; !: more than the {gigabytes(report.usable_bytes)} there are" if report.usable_bytes else ""
    yield f"visual: tokens of the picture > into the LLM > in its last layer. GB: memory that an answer takes{most}."
    if any(form.exported for model in report.models for form in model.forms):
        yield "*: as the bundle is exported; the others are computed, to one per cent of the weights."
    if any(fit.bounds for model in report.models for fit in model.forms[0].budgets.values()):
        yield (
            "ms: the least that the datasheet allows, not measured. Prefill: its FLOPs at the fp16 peak, or w: "
            "reading the weights once. A token: reading weights and cache."
        )


def _clock(clock: Clock) -> str:
    parts = [f"{clock.now} MHz" if clock.now else "", f"of {clock.most}" if clock.most else "", clock.governor or ""]
    return " ".join(filter(None, parts)) or _NOT_TOLD


def _library(name: str, library: Library) -> str:
    # What stands behind a build's number means nothing to users.
    version = re.split("[-+]", library.version)[0] if library.version else "does not import"
    return f"{name} {version}"
