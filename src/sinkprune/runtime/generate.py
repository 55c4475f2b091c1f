"""All steps of a request, from pictures and texts to the last token.

`look` and `run_prompt` are one recipe of answers and of actions: they make a pruned prompt after its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from sinkprune.contract.budgets import Plan
from sinkprune.contract.schedule import Schedule, VisualLayout
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Budgets, Draft, Hooks, Observer, Rows
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.media.images import facts_of
from sinkprune.runtime.steps.answer import Answer, timings
from sinkprune.runtime.steps.chain import encode
from sinkprune.runtime.steps.context_length import check_picture_count, runnable
from sinkprune.runtime.steps.decoding import PromptRun, first_logits, kv_bytes, prefill
from sinkprune.runtime.steps.pictures import PictureLike, layout_of
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.prompt import Prompt


def generate(
    model: LoadedModel, request: Request, new_hooks: Callable[[], Hooks], state: StreamState
) -> Generator[str | None, None, Answer]:
    """Run a request: look at its pictures, prefill, decode, report; returns and raises what `Pipeline.stream` does.

    Yields the text of each token, which may be empty, and None between other passes, so that a server answers other
    requests meanwhile. `model` is that of `LoadedModel.for_plan`. `new_hooks` is called when the first piece is
    requested, because a deadline is counted from then on.
    """
    budgets, rows, tokens, seen = new_hooks()
    manifest, chain, backend = model.manifest, model.chain, model.chain.backend
    clock, plan = Stopwatch(backend, seen.during), budgets.plan
    chain.load_plan(plan)
    check_picture_count(manifest, model.limits, len(request.pictures))
    model.check_text_length(request)
    encode_prompt = partial(model.encode_prompt, request)
    looked = look(model, request.pictures, encode_prompt, plan, rows, seen, clock, "ttft")
    prompt, layouts = looked.prompt, looked.layouts
    possible = runnable(manifest, model.limits, request, budgets.candidates(layouts), prompt.text_tokens, layouts)
    # A server runs the steps up to here beside those of other requests.
    yield None

    with clock.measure("ttft"), backend.turn:
        question_of = partial(model.question_ids, request, prompt)
        run = run_prompt(model, looked, possible, question_of, budgets, rows, seen, clock, request.max_new_tokens)
        logits = backend.numpy(first_logits(chain, run.prefilled, clock))[0]
        if backend.enqueues:
            # Elsewhere the tower's output was checked at once.
            run.check()
        sampler = model.new_sampler(request, prompt, layouts)
        ids = tokens.first(sampler, logits)
    budgets.first_token()
    seen.prefilled(run.prefilled)
    for token in ids:
        seen.chose(token, logits)
    with backend.turn:
        # Refers to nothing on the device.
        new_answer = partial(
            Answer,
            method=request.method,
            budget=run.prefilled.schedule.budget,
            prompt_tokens=prompt.text_tokens,
            visual_tokens=sum(layout.all_tokens for layout in layouts),
            tokens_per_layer=run.prefilled.tokens_per_layer,
            kv_bytes=kv_bytes(chain, run.prefilled.cache.lengths),
            images=run.kept(backend),
            reused_towers=rows.reused_towers,
            reused_rows=run.reused_rows,
        )
        reused = run.reused_pictures
        rows.keep(chain, run)

    state.budget = run.prefilled.schedule.budget
    hooks = Hooks(budgets, rows, tokens, seen)
    draft = Draft(model, request, hooks, state, sampler, run.prefilled.cache, logits, ids)
    # Embeddings take no memory while the answer is decoded.
    del looked, run, logits
    written = yield from tokens.write(draft)
    # Before the deadline's clock stops: a cache of openvino is freed only when no other thread runs the model.
    del draft

    answer = new_answer(
        text=written.text,
        token_ids=written.token_ids,
        finish=written.finish,
        ms=timings(clock.ms(), written.token_ms, written.other_ms),
        deadline=budgets.ended(written.token_ms, reused=reused),
        choices=written.choices,
    )
    seen.answered(answer)
    return answer


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
