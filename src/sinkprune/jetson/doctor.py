"""`sinkprune-doctor`: describes this machine or a board, what fits it, and what to run next."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import WholeNumber, counted, to_json, unknown_name
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, PathOrName, json_outputs, write_result
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.manifest import DialectName
from sinkprune.contract.memory import gigabytes
from sinkprune.jetson.boards import Board, Boards, FactSource, JetPack, preset_manifest, read_boards, read_presets
from sinkprune.jetson.findings import (
    Finding,
    dialect_limit,
    first_steps,
    library_findings,
    machine_findings,
    model_findings,
    next_steps,
    recommendations,
)
from sinkprune.jetson.fit import (
    BOARD_BACKEND,
    BudgetFit,
    FormFit,
    ModelFit,
    ModelState,
    Recommendation,
    TargetMachine,
    fit,
    refused_by_backend,
)
from sinkprune.jetson.host import ClockFrequency, Library, Machine, SystemFiles, read_machine, this_environment
from sinkprune.runtime.backends.known import KNOWN, on_cpu, quickest_backend, usual_backend


@dataclass(frozen=True)
class DoctorReport:
    """A machine or board, the models that fit it, and what to do next."""

    machine: Machine | None
    """None for a board elsewhere."""
    board: str | None
    """The board's name; None if the machine is no known board."""
    board_facts: Board | None
    sources: dict[str, FactSource]
    """The sources of the board's facts, by the names in `Board.sources`."""
    jetpack: JetPack | None
    """The facts about the installed JetPack."""
    backend: str
    usable_bytes: int | None
    """Memory for programs: what is free on this machine now, or about what a board leaves."""
    findings: tuple[Finding, ...]
    models: tuple[ModelFit, ...]
    overview: bool
    """Whether `models` are all presets, because the user named no model."""
    recommendations: tuple[Recommendation, ...]
    """How to run each model that can run."""
    first: tuple[str, ...]
    """What to do before any command can run; empty if nothing prevents one."""
    next: tuple[str, ...]
    """Commands to run next."""


def _report(
    boards: Boards,
    name: str | None,
    machine: Machine | None,
    models: Sequence[str],
    picture: Size,
    wanted: str | None,
) -> DoctorReport:
    """Report how folders and presets, all presets if there are none, fit a `machine`, for an image of that size.

    None is the board with this `name`, elsewhere. `wanted` is the backend; None is TensorRT on a board, and an
    installed backend elsewhere. Raises `UnknownBoardError`.
    """
    board, jetpack, onnxruntime = boards.board(name) if name else None, None, None
    if machine:
        usual = BOARD_BACKEND if machine.chip else quickest_backend(machine.python.imports)
        backend, free, disk_free = wanted or usual, machine.free_bytes or 0, machine.disk_free_bytes
        jetpack = boards.jetpack(machine.jetpack.l4t) if machine.jetpack.l4t else None
        jetpacks, onnxruntime = [jetpack] if jetpack else [], machine.python.version_of("onnxruntime")
    else:
        assert board is not None
        backend, free, disk_free = wanted or BOARD_BACKEND, boards.usable_bytes(board), None
        jetpacks = [pack for pack in boards.jetpacks if board.sm in pack.sm]
    unknown = machine is not None and machine.chip is not None and jetpack is None
    older = unknown or dialect_limit(backend, jetpacks, onnxruntime)
    dialect: DialectName = "opset20" if older else "opset24"
    target = TargetMachine(backend, free, board if backend == BOARD_BACKEND else None, disk_free)
    fits = [_fit(model, dialect, target, picture, wanted) for model in models or read_presets()]
    findings = [*machine_findings(machine, boards)] if machine else []
    # In an overview, a preset that is too large is no finding.
    if models:
        findings += model_findings(fits, free, jetpacks, onnxruntime, elsewhere=machine is None)
        findings += library_findings(machine, fits) if machine else ()
    # A finding that blocks none of these models stops nothing.
    findings = [replace(finding, stops=any(map(finding.blocks, fits))) for finding in findings]
    recommended = recommendations(fits, findings)
    used = set(board.sources.values()) if board else set()
    return DoctorReport(
        machine=machine,
        board=name,
        board_facts=board,
        sources={key: source for key, source in boards.sources.items() if key in used},
        jetpack=jetpack,
        backend=backend,
        usable_bytes=free or None,
        findings=tuple(findings),
        models=tuple(fits),
        overview=not models,
        recommendations=tuple(recommended),
        first=tuple(first_steps(findings, recommended)),
        next=tuple(next_steps(fits, recommended, findings, dialect)),
    )


def _fit(model: str, dialect: DialectName, target: TargetMachine, picture: Size, wanted: str | None) -> ModelFit:
    """Return how a bundle, engines or a preset fits. A folder with the name of a preset comes first.

    Raises `BundleError`, `EnginesError` and `UsageError`.
    """
    presets = read_presets()
    if Path(model).exists():
        bundle = read_runnable(model)
        kind: ModelState = "engines" if bundle.engines else "bundle"
        return fit(model, kind, bundle.manifest, _own_target(model, bundle, target, wanted), picture)
    if model not in presets:
        raise UsageError(unknown_name(f"'{model}' is no folder and no preset", model, presets, "Presets are"))
    return fit(model, "preset", preset_manifest(model, presets[model], dialect), target, picture)


Size = tuple[int, int]
"""Width and height in pixels."""
_BOARDS = "aarch64"
"""The architecture of all boards."""


def _own_target(model: str, bundle: Bundle, target: TargetMachine, wanted: str | None) -> TargetMachine:
    """Return the target for a bundle or for engines, which fix the backend.

    Raises `UsageError` for engines of another target than that of the `wanted` backend, and for engines of a GPU
    whose memory is unknown here.
    """
    if bundle.engines is None:
        return target
    backend, built = usual_backend(bundle.engines), bundle.engines.manifest.target
    if wanted is not None and KNOWN[wanted].target != built:
        raise UsageError(
            f"the engines '{model}' were built for target {built}, and backend '{wanted}' takes target "
            f"{KNOWN[wanted].target}. Leave out --backend, or give the bundle."
        )
    if backend != target.backend and backend not in on_cpu():
        raise UsageError(
            f"the engines '{model}' are for {built}, and the memory of that GPU is unknown "
            "here. Run this on that machine, or add --board NAME."
        )
    built_for = bundle.engines.manifest.flags.get("machine")
    if target.board is not None and built_for not in (None, _BOARDS):
        raise UsageError(
            f"the engines '{model}' were built on {built_for}, and boards have {_BOARDS}. Build them on the board, "
            "or give the bundle."
        )
    enforced = bundle.engines.manifest.enforced_limits
    board = target.board if backend == target.backend else None
    prompt, new = enforced.get("prompt_tokens"), enforced.get("new_tokens")
    return replace(target, backend=backend, board=board, most_prompt=prompt, most_new=new)


_UNKNOWN, _SHOWN = "-", 4


def budget_table(model: ModelFit) -> Table:
    """Return a row for each form of weights and budget: memory, bounds of times, and the longest text of answers."""
    table = make_table(["weights", "budget"], ["visual\ntokens", "memory\nGB", *_bound_headings(model)])
    for form in model.forms:
        name = _form_name(model, form)
        for budget, rows in model.rows.items():
            fit = form.budgets[budget]
            visual = ">".join(map(str, (model.visual_tokens, rows.tokens_per_layer[0], rows.tokens_per_layer[-1])))
            table.add_row(name, plain_text(budget), visual, _memory(fit), *_bound_cells(fit))
            name = ""
    return table


def build_table(model: ModelFit) -> Table:
    """Return a row for each form of weights: the size of its files, and the needs of building its engines."""
    table = make_table(["weights"], ["files GB", "build: memory GB", "disk GB", "disk GB with --move", "build fits"])
    for form in model.forms:
        build = form.build
        if build is None:
            continue
        sizes = (form.weight_bytes, build.memory_bytes, build.disk_bytes, build.moving_disk_bytes)
        fits = False if refused_by_backend(model, form) else build.fits
        cell = _UNKNOWN if fits is None else "no" if not fits else "--move" if build.needs_move else "yes"
        table.add_row(_form_name(model, form), *map(_gigabytes, sizes), _coloured(cell, fits))
    return table


def _form_name(model: ModelFit, form: FormFit) -> str:
    """Return the name of a form of weights, with the type of states where two forms differ in nothing else."""
    same = sum(other.decoder_form == form.decoder_form for other in model.forms)
    return f"{form.decoder_form}{f', {form.precision}' if same > 1 else ''}{'*' if form.exported else ''}"


def overview(models: Sequence[ModelFit], recommended: Sequence[Recommendation]) -> Table:
    """Return a row for each of these presets, all policies or none: its recommendation, with memory and bounds."""
    # Time to first token includes the prefill, for which a row has no room.
    timed = models[0].has_bounds and models[0].policy is None
    headings = _bound_headings(models[0])[timed:]
    table = make_table(["preset", "weights", "budget"], ["memory\nGB", "build\nGB", *headings])
    found = {one.model: one for one in recommended}
    for model in models:
        one = found.get(model.name)
        if one is None:
            table.add_row(model.name, "none")
            continue
        form = next(form for form in model.forms if form.decoder_form == one.weights)
        fit = form.budgets[one.budget]
        build = _gigabytes(form.build.memory_bytes) if form.build else _UNKNOWN
        table.add_row(model.name, one.weights, one.budget, _memory(fit), build, *_bound_cells(fit)[timed:])
    return table


def legend(report: DoctorReport) -> Iterator[str]:
    """Yield a line for each thing in the tables that needs words."""
    requests = dict[str, list[str]]()
    for model in report.models:
        prompt = f"a prompt of {counted(model.prompt_tokens, 'token')}"
        request = f"one picture, {prompt} and {counted(model.new_tokens, 'new token')}"
        if model.policy:
            request = f"a frame of {counted(model.policy.cameras, 'camera')} and {prompt}"
        requests.setdefault(request, []).append(model.name)
    for request, names in requests.items():
        few = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        yield f"memory{f' of {few}' if len(requests) > 1 else ''}: for {request}."
    if report.usable_bytes:
        yield f"!: more than the {gigabytes(report.usable_bytes)} of memory that programs can take."
    if not report.overview:
        yield "visual tokens: of the pictures > into the LLM > in its last layer."
    if any(form.build for model in report.models for form in model.forms):
        yield "build: memory for the largest graph, without activations."
        if not report.overview:
            yield "files: weights without embeddings. disk: what a build takes next to the bundle, at most."
    if report.overview:
        yield "none: no weights fit, or their engines cannot be built there."
    if any(form.exported for model in report.models for form in model.forms):
        yield "*: the folder as it is. The other forms are computed, to one per cent of the weights."
    answering = [model for model in report.models if model.policy is None]
    if answering:
        yield "text: the most tokens of prompt and answer together that fit after the picture."
        if any(model.has_bounds for model in answering):
            prefill = "" if report.overview else "prefill, "
            yield f"{prefill}TTFT, token: the least that the datasheet allows, for each. Bounds, not forecasts."
            yield "TTFT: vision tower and prefill; preparing the picture is not counted."
            if prefill:
                yield "w: reading the weights bounds the prefill, and a smaller budget gains nothing."
        if not all(model.has_bounds for model in answering):
            yield "token GB: bytes that a token reads, weights and cache."
    if len(answering) < len(report.models):
        yield "FLOPs, bytes: bounds of a chunk by either, at so many denoising steps. It takes at least the larger."
        yield "bytes: weights once, and those of the expert and the cache in each step."
    if not all(model.has_bounds for model in report.models):
        yield "Bounds of times are known only for TensorRT on a board."


def verdicts(report: DoctorReport) -> Iterator[str]:
    """Yield whether each model fits, and how to run it; of all presets, which fit."""
    found = {one.model: one for one in report.recommendations}
    if report.overview:
        names = f": {', '.join(found)}" if found else ""
        yield f"{len(found)} of {counted(len(report.models), 'preset')} fit{names}."
        return
    for model in report.models:
        one = found.get(model.name)
        yield recommendation(one, model) if one else f"{model.name} does not fit on {model.backend}."


def recommendation(found: Recommendation, model: ModelFit) -> str:
    """Return in words that a model fits, how to run it and why."""
    alike = [form for form in model.forms if form.decoder_form == found.weights]
    form = next(form for form in alike if form.precision == found.precision)
    weights = f"{found.weights} with {found.precision} states" if len(alike) > 1 else found.weights
    fit = form.budgets[found.budget]
    needs = f"{found.model} fits: {weights} at {found.budget} on {found.backend}, in {gigabytes(fit.memory_bytes)}."
    least = ""
    if model.policy and model.has_bounds:
        bounds = fit.chunks[str(model.policy.steps)]
        ms = max(bounds.flops_ms or 0, bounds.bytes_ms or 0)
        chunk = f"a chunk of {model.policy.actions} actions at {model.policy.steps} steps"
        least = f"By the datasheet, {chunk} takes at least {_two_digits(ms)} ms (a bound, no forecast)."
    return " ".join(filter(None, (needs, found.why, found.faster, least)))


def _bound_headings(model: ModelFit) -> list[str]:
    """Return the headings of the bounds, in the order of `_bound_cells`."""
    if model.policy is None:
        return [*(["prefill ms", "TTFT ms", "token ms"] if model.has_bounds else ["token GB"]), "text tokens"]
    units = ("FLOPs,\nms at", "bytes,\nms at") if model.has_bounds else ("TFLOP\nat", "GB read\nat")
    return [f"{unit}\n{steps} steps" for unit in units for steps in model.forms[0].budgets[UNPRUNED].chunks]


def _bound_cells(fit: BudgetFit) -> list[str]:
    bounds, text = fit.bounds, _UNKNOWN if fit.longest_text is None else str(fit.longest_text)
    if fit.chunks:
        flops = (chunk.flops / 1e12 if chunk.flops_ms is None else chunk.flops_ms for chunk in fit.chunks.values())
        read = (chunk.bytes / 1e9 if chunk.bytes_ms is None else chunk.bytes_ms for chunk in fit.chunks.values())
        return [*map(_two_digits, flops), *map(_two_digits, read)]
    if bounds is None:
        return [_gigabytes(fit.decode_bytes, digits=2), text]
    times = (bounds.prefill_ms, bounds.encoder_flops_ms + bounds.prefill_ms, bounds.token_ms)
    prefill, *others = map(_two_digits, times)
    return [f"{prefill}{'w' if bounds.by_weights else ' '}", *others, text]


def _two_digits(value: float) -> str:
    """Return a number with two digits at least, and none of its zeros left out."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _memory(fit: BudgetFit) -> Text:
    needed = _gigabytes(fit.memory_bytes)
    return _coloured(f"{needed}!" if fit.fits is False else f"{needed} ", fit.fits)


def _gigabytes(size: int, digits: int = 1) -> str:
    """Return bytes in gigabytes, without the unit; less than one digit is a bound like "<0.1"."""
    return f"{size / 1e9:.{digits}f}" if size >= 0.5e9 / 10**digits else f"<{10**-digits:g}"


def _coloured(text: str, fits: bool | None) -> Text:
    return Text(text, style="" if fits is None else "green" if fits else "red")


_FIT = "sinkprune-run --fit pad shows it all (docs/pictures.md)"
_MAX_PIXELS = "for small things export with a larger --max-pixels (docs/pictures.md)"


def print_report(report: DoctorReport) -> None:
    """Print the verdict and what to do, and then the reasons: findings, the machine, tables and their legend."""
    console = TableConsole(100, soft_wrap=False)
    for line in verdicts(report):
        console.print(plain_text(line), style="bold")
    for title, lines in (("First:", report.first), ("Next:", report.next)):
        if lines:
            console.print(f"\n{title}", style="bold")
        for line in lines:
            # A comment would make the line longer than most terminals.
            command, *comment = line.split("  # ", 1)
            for text in (command, *(f"# {words}" for words in comment)):
                console.print(plain_text(f"  {text}"), soft_wrap=True)
    if report.first and not report.next:
        console.print("  Then run sinkprune-doctor again: it prints the commands.")
    console.print()
    for finding in report.findings:
        console.print(_finding(finding), soft_wrap=True)
    if report.machine and not report.findings:
        console.print("No problems found.")
    rows = _machine_rows(report.machine) if report.machine else iter(())
    for name, text in (*rows, *_board_rows(report.board_facts, report)):
        console.print(Text.assemble((f"{name:<14}", "bold"), plain_text(text)), soft_wrap=True)
    if report.overview:
        for acts in (False, True):
            models = [model for model in report.models if (model.policy is not None) == acts]
            console.print()
            console.print(overview(models, report.recommendations))
    for model in () if report.overview else report.models:
        width, height = model.picture
        cameras = f"{counted(model.policy.cameras, 'camera')} with frames of" if model.policy else "a picture of"
        console.print()
        title = f"{model.name}: {model.visual_tokens} visual tokens of {cameras} {width}x{height}"
        console.print(plain_text(title), style="bold", soft_wrap=True)
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


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "machine", machine.model or f"no Jetson: {machine.processor}, {machine.python.architecture}"
    if machine.chip:
        yield "board", machine.board or f"{machine.chip}, unknown module"
    system = filter(None, (machine.system, machine.kernel and f"Linux {machine.kernel}"))
    yield "system", ", ".join(system) or _UNKNOWN
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
    free = f", {gigabytes(machine.free_bytes)} free" if machine.free_bytes else ""
    yield "memory", (gigabytes(machine.memory_bytes) if machine.memory_bytes else _UNKNOWN) + free
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
    yield "datasheet", figures
    yield "", "dense, in the fastest power mode; verify before quoting"
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


_EXAMPLES = """\
examples:
  sinkprune-doctor                                       # this machine, and which presets fit
  sinkprune-doctor llava-7b llava-7b-int4                # which of these bundles fit, and what to run next
  sinkprune-doctor --board orin-nano-8gb                 # needs and bounds on a board, from anywhere
  sinkprune-doctor --board agx-orin-64gb qwen2.5-vl-7b --picture 1280x720
  sinkprune-doctor --board agx-orin-32gb pi0.5           # a robot policy: the bounds of its chunks
  sinkprune-doctor --json > machine.json

Bounds come from datasheets, not from measurements; memory on boards is an estimate: docs/doctor.md.
"""
_SIDE = WholeNumber("a side of --picture", 1, 16384)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    boards = read_boards()
    options = _parser(", ".join(boards.boards), ", ".join(read_presets())).parse_args(arguments)
    check_outputs(json_outputs(options.json), folders=map(Path, options.models))
    name, machine, picture = options.board, None, _size(options.picture)
    if name is None:
        with status("looking at this machine"):
            machine = read_machine(SystemFiles(options.root), this_environment(), boards, Path())
            name = machine.board
    report = _report(boards, name, machine, options.models, picture, options.backend)
    write_result(options.json, to_json(report), lambda: print_report(report))


def _size(words: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", words)
    if found is None:
        raise UsageError(f"--picture is '{words}', expected width and height in pixels, as in 640x480.")
    return _SIDE(found[1]), _SIDE(found[2])


def _cpu_backend(name: str) -> str:
    if name in KNOWN and KNOWN[name].on_gpu:
        raise UsageError(
            f"--backend is '{name}', expected a library for CPUs: {', '.join(on_cpu())}. For TensorRT leave it "
            "out on the board, or give --board NAME on any machine; sinkprune-profile measures any other library."
        )
    return name


def _parser(boards: str, presets: str) -> CommandParser:
    parser = CommandParser(
        "sinkprune doctor",
        "Report on this machine, or on a Jetson board: which models fit, with which weights and budget, "
        "what to fix first, and what to run next.",
        f"{_EXAMPLES}\nboards:\n  {boards}\npresets:\n  {presets}\n",
    )
    add = parser.add_argument
    words = "a folder of a bundle or of engines, or a preset (default: every preset)"
    add("models", type=PathOrName, nargs="*", metavar="MODEL", help=words)
    add("--board", metavar="NAME", help="report on this board instead of this machine")
    add("--picture", default="640x480", metavar="WxH", help="size of the image in a request (default: 640x480)")
    words = "engine library (default: tensorrt on a board, else the installed one)"
    add("--backend", type=_cpu_backend, choices=on_cpu(), help=words)
    parser.add_json("the whole report")
    # A recorded tree of a system's files, in place of this machine's.
    add("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    return parser
