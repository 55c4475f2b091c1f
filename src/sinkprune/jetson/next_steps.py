"""What to do first if a finding stops a model, and the commands to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from sinkprune.contract.manifest import DialectName
from sinkprune.jetson.findings import Finding
from sinkprune.jetson.fit import BOARD_BACKEND, ModelFit
from sinkprune.jetson.recommendation import Recommendation, recommend
from sinkprune.runtime.steps.request import DEFAULT_METHOD

_OF_A_PRESET = "# true shapes; for its weights give the checkpoint, without --random-weights"
_REQUEST = '--image PICTURE.jpg --prompt "QUESTION"'


def recommendations(models: Sequence[ModelFit], findings: Sequence[Finding]) -> list[Recommendation]:
    """Return the recommendation for each model that can run, unchanged unless a finding forbids it."""
    forbidden = {finding.model for finding in findings if finding.stops}
    found = (recommend(model, as_it_is=model.name not in forbidden) for model in models)
    return [one for one in found if one is not None]


def first_steps(findings: Sequence[Finding], recommended: Sequence[Recommendation]) -> list[str]:
    """Return what to do before any command can run, for which model, in the order of the findings.

    A finding about a model is left out if `next_steps` has the command that fixes it.
    """
    fixed = {found.model for found in recommended}
    stops = (finding for finding in findings if finding.stops and finding.model not in fixed)
    return [f"for '{one.model}': {one.do}" if one.model is not None else one.do for one in stops]


def next_steps(
    models: Sequence[ModelFit],
    recommended: Sequence[Recommendation],
    findings: Sequence[Finding],
    dialect: DialectName,
) -> list[str]:
    """Return a command or two for each recommendation; for presets, only the export of the first.

    A model whose backend is blocked by a finding about the machine gets none. A new export has `dialect`.
    """
    by_name = {model.name: model for model in models}
    commands = (
        command
        for found in recommended
        if not any(finding.blocks(by_name[found.model]) and finding.model is None for finding in findings)
        for command in _commands(by_name[found.model], found, dialect)
    )
    if all(model.kind == "preset" for model in models):
        return [f"{command}  {_OF_A_PRESET}" for command in islice(commands, 1)]
    return list(commands)


def _commands(model: ModelFit, found: Recommendation, dialect: DialectName) -> Iterator[str]:
    if found.as_it_is:
        yield from _with_folder(model, found)
    else:
        yield _export(model, found, dialect)


def _with_folder(model: ModelFit, found: Recommendation) -> Iterator[str]:
    folder = shlex.quote(model.name)
    method = "" if model.method in ("", DEFAULT_METHOD) else f" --method {shlex.quote(model.method)}"
    plan = f"{method} --budget {found.budget}"
    if model.kind == "engines":
        yield f"sinkprune-run {folder} {_REQUEST}{plan}"
    elif model.backend == BOARD_BACKEND:
        engines = shlex.quote(f"{model.name.rstrip('/')}-engines")
        limits = f"--max-prompt {2 * model.prompt_tokens} --max-new-tokens {model.new_tokens}"
        own = next(form for form in model.forms if form.exported)
        move = " --move" if own.build and own.build.needs_move else ""
        yield f"sinkprune-build {folder} -o {engines} --target tensorrt {limits}{move}"
        yield f"sinkprune-run {engines} {_REQUEST}{plan}"
    else:
        yield f"sinkprune-run {folder} --backend {model.backend} {_REQUEST}{plan}"


def _export(model: ModelFit, found: Recommendation, dialect: DialectName) -> str:
    """Return the command that exports a model in the recommended form; a preset gets random weights."""
    source = shlex.quote(model.source)
    if model.random_weights:
        source += " --random-weights"
    elif "/" not in model.source and not Path(model.source).is_dir():
        # A bundle has the name of its checkpoint's folder, not its path.
        source = shlex.quote(f"PATH/TO/{model.source}")
    place = f"{model.name.rstrip('/').rpartition('/')[2]}-{found.weights}"
    words = ["sinkprune-export", source, "-o", shlex.quote(place), "--precision", found.precision]
    if found.weights != found.precision:
        words += ["--weights", found.weights]
    # opset20 runs wherever opset24 runs.
    if "opset20" in (model.dialect, dialect):
        words += ["--dialect", "opset20"]
    return " ".join(words)
