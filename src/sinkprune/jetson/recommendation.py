"""The one recommendation for a model on a machine: the form of weights and the budget that answer soonest there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.precision import PrecisionName
from sinkprune.contract.system.memory_need import gigabytes
from sinkprune.jetson.fit import BOARD_BACKEND, BudgetFit, FormFit, ModelFit
from sinkprune.jetson.times import Milliseconds


@dataclass(frozen=True)
class Recommendation:
    """What to run of a model, and why."""

    model: str
    weights: str
    """The form of the decoder's weights."""
    precision: PrecisionName
    """The type of states."""
    as_it_is: bool
    """Whether it is the folder as it is exported or built; else the model must be exported so first."""
    budget: str
    backend: str
    answer_ms: Milliseconds | None
    """How long a typical request takes; None where the machine's speed is not known."""
    why: str
    """The reason, as a sentence."""
    faster: str | None
    """Which weights would answer sooner than those of the folder, as a sentence; None where none would."""


def choices(model: ModelFit) -> Iterator[FormFit]:
    """Yield the forms of weights that the backend takes, that can be built where they must be, and that fit."""
    for form, _ in model.fitting():
        builds = model.backend != BOARD_BACKEND or form.build is None or form.build.fits is not False
        if builds and not refused_by_backend(model, form):
            yield form


def refused_by_backend(model: ModelFit, form: FormFit) -> bool:
    """Return whether the backend takes no weights or states of this form: TensorRT builds fp16 states, no uint4."""
    built = model.kind == "engines" and form.exported
    return model.backend == BOARD_BACKEND and not built and (form.precision != "fp16" or "uint4" in form.weights)


def best_choice(model: ModelFit) -> tuple[FormFit, str] | None:
    """Return the form that answers soonest and its budget; None where no form can run.

    Budgets come first: the largest pruned budget that fits in any form, because it is the most accurate. Of the forms
    that fit at this budget the quickest is the choice, whether the folder has it or not.
    """
    forms = list(choices(model))
    budget = next((name for name in _pruned_first(model) if any(_fits(form, name) for form in forms)), None)
    if budget is None:
        return None
    return min((form for form in forms if _fits(form, budget)), key=lambda form: _slowness(form, budget)), budget


def recommend(model: ModelFit, *, as_it_is: bool) -> Recommendation | None:
    """Return what to run of a model: the folder as it is where it can run so, else the best choice; None without one.

    `as_it_is` says whether no finding forbids the folder as it is.
    """
    best = best_choice(model)
    if best is None:
        return None
    form, budget = best
    own = next((form for form in choices(model) if form.exported and as_it_is), None)
    if own is not None:
        form, budget = own, next(name for name in _pruned_first(model) if _fits(own, name))
    compared = [name for name in choices(model) if _fits(name, budget)]
    return Recommendation(
        model=model.name,
        weights=form.decoder_form,
        precision=form.precision,
        as_it_is=own is not None,
        budget=budget,
        backend=model.backend,
        answer_ms=_answer(form.budgets[budget]),
        why=_why(model, form, budget, compared, own is not None),
        faster=_faster(form, budget, compared) if own is not None and model.kind != "engines" else None,
    )


def _pruned_first(model: ModelFit) -> list[str]:
    """The budgets from the largest pruned one down; unpruned last, because pruning is what a user came for."""
    return [*(name for name in model.rows if name != UNPRUNED), UNPRUNED]


def _fits(form: FormFit, budget: str) -> bool:
    return form.budgets[budget].fits is not False


def _slowness(form: FormFit, budget: str) -> float:
    """Milliseconds at the slow end of the range; bytes that a token reads where the machine's speed is not known."""
    fit = form.budgets[budget]
    return fit.times.answer.most if fit.times else float(fit.decode_bytes)


def _answer(fit: BudgetFit) -> Milliseconds | None:
    return fit.times.answer if fit.times else None


def _why(model: ModelFit, form: FormFit, budget: str, compared: list[FormFit], there: bool) -> str:
    """Return the reason for a choice, as a sentence."""
    if there:
        return f"'{model.name}' runs as it is."
    if len(compared) == 1:
        return f"Only {form.decoder_form} fits."
    names = ", ".join(other.decoder_form for other in compared)
    fit = form.budgets[budget]
    if fit.times is None:
        return (
            f"Of {names}, {form.decoder_form} reads the fewest bytes for a token, {gigabytes(fit.decode_bytes)}; the "
            "speed of this machine is not known."
        )
    return f"{form.decoder_form} answers soonest (compared: {names})."


def _faster(own: FormFit, budget: str, compared: list[FormFit]) -> str | None:
    """Return which other form would be quicker than the folder's own, as a sentence; None where none would."""
    best = min(compared, key=lambda form: _slowness(form, budget))
    if best is own:
        return None
    new, old = best.budgets[budget], own.budgets[budget]
    if new.times and old.times:
        told = f"would take {new.times.token.range} ms a token, these {old.times.token.range}"
    else:
        told = f"would read {gigabytes(new.decode_bytes)} a token, these {gigabytes(old.decode_bytes)}"
    return f"Weights in {best.decoder_form} {told}: export with --weights {best.decoder_form}."
