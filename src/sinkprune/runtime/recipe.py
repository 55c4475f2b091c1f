"""The one recipe of answers and of actions: pictures and texts in, a pruned prompt after its prefill out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sinkprune.contract.budgets import Plan
from sinkprune.contract.schedule import Schedule, VisualLayout
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Budgets, Observer, Rows
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.media.images import facts_of
from sinkprune.runtime.steps.chain import encode
from sinkprune.runtime.steps.decoding import PromptRun, prefill
from sinkprune.runtime.steps.pictures import PictureLike, layout_of
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.text.prompt import Prompt


@dataclass(frozen=True)
class Look:
    """The pictures and texts of a request, before anything runs on the device."""

    pictures: list[TowerInput]
    """Emptied by `run_prompt`: the inputs of large pictures take memory."""
    layouts: list[VisualLayout]
    prompt: Prompt


def look(
    model: LoadedModel,
    sources: Iterable[PictureLike],
    encode_prompt: Callable[[Sequence[VisualLayout]], Prompt],
    plan: Plan | None,
    rows: Rows,
    seen: Observer,
    clock: Stopwatch,
    whole: str,
) -> Look:
    """Decode, lay out and preprocess the pictures, and tokenize the texts around them.

    Times count as `preprocess` within the part `whole`, without decoding. Raises `ImageError` and `PromptError`.
    """
    pictures = list[TowerInput]()
    for place, source in enumerate(sources):
        # One after the other, because the pixels of a large picture take hundreds of MB.
        picture = model.picture_of(source)
        with clock.measure(whole, "preprocess"):
            layout = layout_of(picture, source, model.family)
            inputs = {} if rows.knows(place, picture, plan) else model.tower_inputs(picture)
            pictures.append(TowerInput(inputs, layout, facts_of(picture)))
        del picture, inputs
    layouts = [each.layout for each in pictures]
    with clock.measure(whole, "preprocess"):
        prompt = encode_prompt(layouts)
    seen.seen([*pictures])
    model.warnings.warn(layouts, [each.file for each in pictures])
    return Look(pictures, layouts, prompt)


def run_prompt(
    model: LoadedModel,
    looked: Look,
    possible: Sequence[Schedule],
    question_of: Callable[[Plan | None], Sequence[int]],
    budgets: Budgets,
    rows: Rows,
    seen: Observer,
    clock: Stopwatch,
    answer: int = 0,
) -> PromptRun:
    """Run tower, sanitizer, projector, segments and selects; call it in the backend's `turn`.

    Caches expect `answer` rows after those of the prompt.
    `question_of` returns the token ids that the sanitizer of a plan reads, if any. Raises what `run_tower`, `encode`
    and `prefill` do.
    """
    chain, backend = model.chain, model.chain.backend
    towers = rows.towers(chain, budgets.plan, looked.pictures, clock)
    looked.pictures.clear()
    if budgets.timed:
        for tower in towers:
            tower.scores.check()
    planned = budgets.choose(possible, looked.prompt.text_tokens)
    plan, texts = planned.plan, looked.prompt.texts
    question = question_of(plan)
    restored = rows.restore(model.manifest, plan, texts, question)
    encoded = restored.encoded
    if encoded is None:
        words = backend.tensor(model.embedding(question)) if question else None
        encoded = [encode(chain, plan, tower, clock, words) for tower in towers]
    norms = towers[0].device_norms if towers else None
    del towers
    seen.encoded(encoded)
    between, pruned = model.family.between_rows, plan is not None
    laid_out = lay_out(backend, model.embedding, between, texts, looked.layouts, encoded, pruned=pruned)
    seen.laid_out(laid_out)
    prefilled = prefill(chain, planned, laid_out, clock, norms, restored.stored, answer)
    return PromptRun(
        prompt=looked.prompt,
        layouts=looked.layouts,
        encoded=encoded,
        rows=laid_out,
        prefilled=prefilled,
        reused_rows=restored.stored[0].rows if restored.stored else 0,
        reused_pictures=restored.encoded is not None,
    )
