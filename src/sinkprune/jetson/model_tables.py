"""The models of a report as tables, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.command_line.table_console import make_table, plain_text
from sinkprune.contract.system.memory_need import gigabytes
from sinkprune.jetson.fit import BudgetFit, FormFit, ModelFit
from sinkprune.jetson.recommendation import Recommendation, refused_by_backend
from sinkprune.jetson.report import DoctorReport

_UNKNOWN = "-"


def heading(model: ModelFit) -> str:
    """Return the line above the tables of a model."""
    width, height = model.picture
    return f"{model.name}: {model.visual_tokens} visual tokens of a {width}x{height} picture, on {model.backend}"


def budget_table(model: ModelFit) -> Table:
    """Return a row for each form of weights and budget: memory, bounds of times and the longest context."""
    timed = model.has_bounds
    table = make_table(["weights", "budget"], ["visual", "GB", *_time_headings(timed), "text"])
    for form in model.forms:
        name = _form_name(model, form)
        for budget, rows in model.rows.items():
            fit = form.budgets[budget]
            visual = ">".join(map(str, (model.visual_tokens, rows.tokens_per_layer[0], rows.tokens_per_layer[-1])))
            table.add_row(name, plain_text(budget), visual, _memory(fit), *_time_cells(fit), _text(fit))
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
    """Return a row for each preset: its recommendation, with memory, bounds of times and the longest context."""
    timed = any(model.has_bounds for model in models)
    table = make_table(["preset", "weights", "budget"], ["GB", "build", *_time_headings(timed)[timed:], "text"])
    found = {one.model: one for one in recommended}
    for model in models:
        one = found.get(model.name)
        if one is None:
            table.add_row(model.name, "none")
            continue
        form = next(form for form in model.forms if form.decoder_form == one.weights)
        fit = form.budgets[one.budget]
        build = _gigabytes(form.build.memory_bytes) if form.build else _UNKNOWN
        table.add_row(model.name, one.weights, one.budget, _memory(fit), build, *_time_cells(fit)[timed:], _text(fit))
    return table


def legend(report: DoctorReport) -> Iterator[str]:
    """Yield what the columns of the tables mean."""
    model, requests = report.models[0], dict[tuple[int, int], list[str]]()
    for each in report.models:
        requests.setdefault((each.prompt_tokens, each.new_tokens), []).append(each.name)
    for (prompt, new), names in requests.items():
        of = f" of {', '.join(names)}" if len(requests) > 1 else ""
        words = f"a prompt of {counted(prompt, 'token')} and {counted(new, 'new token')}"
        yield f"GB{of}: memory for one picture, {words}."
    if report.usable_bytes:
        yield f"!: more than the {gigabytes(report.usable_bytes)} of memory that programs can take."
    built = any(form.build for form in model.forms)
    if report.overview:
        if built:
            yield "build: memory for the largest graph, without activations."
        yield "none: no weights fit, or their engines cannot be built there."
    else:
        yield "visual: tokens of the picture > tokens into the LLM > tokens in its last layer."
        if built:
            yield "files: weights without embeddings. build: memory for the largest graph, without activations."
            yield "disk: what a build takes next to the bundle, at most."
    yield "text: the most tokens of prompt and answer together that fit after the picture."
    if any(form.exported for one in report.models for form in one.forms):
        yield "*: the folder as it is. The other forms are computed, to one per cent of the weights."
    if not any(model.has_bounds for model in report.models):
        yield "token GB: bytes that a token reads, weights and cache."
        yield "Bounds of times are known only for TensorRT on a board."
        return
    timed = "TTFT, token" if report.overview else "prefill, TTFT, token"
    yield f"{timed}: the least milliseconds that the datasheet allows, for each."
    yield "TTFT: vision tower and prefill; preparing the picture is not counted."
    if not report.overview:
        yield "w: reading the weights bounds the prefill, and a smaller budget gains nothing."


def recommendation(found: Recommendation, report: DoctorReport) -> str:
    """Return the recommendation for a model, as sentences."""
    model = next(model for model in report.models if model.name == found.model)
    same = sum(form.decoder_form == found.weights for form in model.forms)
    weights = f"{found.weights} with {found.precision} states" if same > 1 else found.weights
    text = f"{found.model}: {weights} at {found.budget} on {found.backend}. {found.why}"
    return f"{text} {found.faster}" if found.faster else text


def _time_headings(timed: bool) -> list[str]:
    return ["prefill", "TTFT", "token"] if timed else ["token GB"]


def _time_cells(fit: BudgetFit) -> list[str]:
    bounds = fit.bounds
    if bounds is None:
        return [_gigabytes(fit.decode_bytes, digits=2)]
    prefill = f"{_rounded(bounds.prefill_ms)}{'w' if bounds.by_weights else ' '}"
    return [prefill, _rounded(bounds.encoder_flops_ms + bounds.prefill_ms), _rounded(bounds.token_ms)]


def _rounded(milliseconds: float) -> str:
    """Return milliseconds with two digits at least."""
    return f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.2g}"


def _memory(fit: BudgetFit) -> Text:
    needed = _gigabytes(fit.memory_bytes)
    return _coloured(f"{needed}!" if fit.fits is False else f"{needed} ", fit.fits)


def _gigabytes(size: int, digits: int = 1) -> str:
    """Return bytes in gigabytes, without the unit; less than one digit is a bound like "<0.1"."""
    return f"{size / 1e9:.{digits}f}" if size >= 0.5e9 / 10**digits else f"<{10**-digits:g}"


def _text(fit: BudgetFit) -> str:
    return _UNKNOWN if fit.longest_text is None else str(fit.longest_text)


def _coloured(text: str, fits: bool | None) -> Text:
    return Text(text, style="" if fits is None else "green" if fits else "red")
