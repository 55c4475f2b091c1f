"""The recommendation for a model on a machine: the form of weights and the budget to run.

Of two forms at one budget, the one that reads fewer bytes a token has the lower bounds of all times: a prefill has
the same FLOPs in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sinkprune.contract.budgets import FAMILIES, UNPRUNED
from sinkprune.contract.memory import gigabytes
from sinkprune.contract.precision import PrecisionName
from sinkprune.jetson.fit import BOARD_BACKEND, FormFit, ModelFit


@dataclass(frozen=True)
class Recommendation:
    """How to run a model, and why."""

    model: str
    weights: str
    """The form of the decoder's weights."""
    precision: PrecisionName
    """The type of states."""
    as_it_is: bool
    """Whether the folder can run unchanged; else the model must first be exported in this form."""
    budget: str
    backend: str
    why: str
    """The reason, as a sentence."""
    faster: str | None
    """The weights that would read fewer bytes a token than those of the folder, as a sentence; None if none would."""


def usable_forms(model: ModelFit) -> Iterator[FormFit]:
    """Yield the forms of weights that fit, that the backend supports, and that can be built if necessary."""
    for form, _ in model.fitting():
        builds = model.backend != BOARD_BACKEND or form.build is None or form.build.fits is not False
        if builds and not refused_by_backend(model, form):
            yield form


def refused_by_backend(model: ModelFit, form: FormFit) -> bool:
    """Return whether the backend does not support this form: TensorRT needs fp16 states and no uint4."""
    built = model.kind == "engines" and form.exported
    return model.backend == BOARD_BACKEND and not built and (form.precision != "fp16" or "uint4" in form.weights)


def best_form(model: ModelFit) -> tuple[FormFit, str] | None:
    """Return the form to export that reads the fewest bytes a token, and its budget; None if no form can run.

    The budget comes first: the largest pruned one that an export makes and that fits in any form, because it is the
    most accurate. Then comes the form that reads the fewest bytes of those that fit at this budget, whether the
    folder has it or not.
    """
    forms = list(usable_forms(model))
    # Without budgets that were added to the folder.
    made = (UNPRUNED, *FAMILIES[model.family].budgets)
    names = [name for name in _pruned_first(model) if name in made]
    budget = next((name for name in names if any(_fits(form, name) for form in forms)), None)
    if budget is None:
        return None
    return _fewest_bytes((form for form in forms if _fits(form, budget)), budget), budget


def recommend(model: ModelFit, *, as_it_is: bool) -> Recommendation | None:
    """Return the folder unchanged if it can run, and else the best choice; None if there is none.

    `as_it_is` is False if a finding forbids the folder unchanged.
    """
    own = next((form for form in usable_forms(model) if form.exported and as_it_is), None)
    best = best_form(model) if own is None else (own, next(name for name in _pruned_first(model) if _fits(own, name)))
    if best is None:
        return None
    form, budget = best
    compared = [name for name in usable_forms(model) if _fits(name, budget)]
    return Recommendation(
        model=model.name,
        weights=form.decoder_form,
        precision=form.precision,
        as_it_is=own is not None,
        budget=budget,
        backend=model.backend,
        why=_why(model, form, budget, compared, own is not None),
        faster=_faster(form, budget, compared) if own is not None and model.kind != "engines" else None,
    )


def _pruned_first(model: ModelFit) -> list[str]:
    """Return the pruned budgets, largest first, and unpruned last. An added budget may be larger than others."""
    pruned = [name for name in model.rows if name != UNPRUNED]
    return [*sorted(pruned, key=lambda name: -sum(model.rows[name].tokens_per_layer)), UNPRUNED]


def _fits(form: FormFit, budget: str) -> bool:
    return form.budgets[budget].fits is not False


def _fewest_bytes(forms: Iterable[FormFit], budget: str) -> FormFit:
    return min(forms, key=lambda form: form.budgets[budget].decode_bytes)


def _why(model: ModelFit, form: FormFit, budget: str, compared: list[FormFit], as_it_is: bool) -> str:
    """Return the reason for a choice, as a sentence."""
    if as_it_is:
        return f"'{model.name}' fits as it is. sinkprune-run compares the sums of its files."
    if len(compared) == 1:
        return f"Only {form.decoder_form} fits."
    names = ", ".join(other.decoder_form for other in compared)
    size = gigabytes(form.budgets[budget].decode_bytes)
    return f"Of {names}, {form.decoder_form} reads the fewest bytes for a token, {size}."


def _faster(own: FormFit, budget: str, compared: list[FormFit]) -> str | None:
    """Return the form that reads fewer bytes than the folder's own, as a sentence; None if there is none."""
    best = _fewest_bytes(compared, budget)
    if best is own:
        return None
    new, old = (gigabytes(form.budgets[budget].decode_bytes) for form in (best, own))
    form = best.decoder_form
    return f"Weights in {form} would read {new} a token, these {old}: export with --weights {form}."
