"""The commands to run next, as they are typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import islice

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.jetson.fit import BOARD_BACKEND, FormFit, ModelFit

_OF_A_PRESET = "# true shapes; for its weights give the checkpoint, without --random-weights"
_ASKED = '--image PICTURE.jpg --prompt "What is in front of me?"'


def next_steps(models: Sequence[ModelFit]) -> list[str]:
    """A command or two for each model that fits; for presets, how the first is exported for that machine."""
    there = [model for model in models if model.kind != "preset"]
    if there:
        return [command for model in there for command in _with_folder(model)]
    exports = (_export(model, form) for model in models for form in _best(model))
    return [f"{command}  {_OF_A_PRESET}" for command in islice(exports, 1)]


def _with_folder(model: ModelFit) -> Iterator[str]:
    folder = shlex.quote(model.name)
    own = next((form for form, _ in model.fitting() if form.exported), None)
    if own is None:
        for form in _best(model):
            yield _export(model, form)
        return
    fitting = [name for name, fit in own.budgets.items() if fit.fits is not False]
    # As accurate as there is room for, but pruned: that is what a user came for.
    budget = next((name for name in fitting if name != UNPRUNED), fitting[0])
    if model.kind == "engines":
        yield f"sinkprune-run {folder} {_ASKED} --budget {budget}"
    elif model.backend == BOARD_BACKEND:
        engines = shlex.quote(f"{model.name.rstrip('/')}-engines")
        limits = f"--max-prompt {2 * model.prompt_tokens} --max-new-tokens {model.new_tokens}"
        yield f"sinkprune-build {folder} -o {engines} --target tensorrt {limits}"
        yield f"sinkprune-run {engines} {_ASKED} --budget {budget}"
    else:
        yield f"sinkprune-run {folder} --backend {model.backend} {_ASKED} --budget {budget}"


def _best(model: ModelFit) -> list[FormFit]:
    """The first form that fits, which is the one with most bits; none where none does."""
    return [form for form, _ in model.fitting()][:1]


def _export(model: ModelFit, form: FormFit) -> str:
    """How to export a model in `form`; of a preset its true shapes."""
    given = shlex.quote(model.source) + (" --random-weights" if model.random_weights else "")
    place = f"{model.name.rstrip('/').rpartition('/')[2]}-{form.decoder_form}"
    words = ["sinkprune-export", given, "-o", shlex.quote(place), "--precision", form.precision]
    if form.decoder_form != form.precision:
        words += ["--weights", form.decoder_form]
    if model.dialect != "opset24":
        words += ["--dialect", model.dialect]
    return " ".join(words)
