"""All steps of a request, from pictures and texts to the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator

from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import Array
from sinkprune.runtime.deadline.choices import runnable
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.steps.answer import Answer, timings
from sinkprune.runtime.steps.choice_scores import ChoiceTokens
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.decoding import kept_tokens, kv_bytes, prefill, prefix_of
from sinkprune.runtime.steps.encoding import encode, run_tower
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.part_seen import warn_if_partly_seen
from sinkprune.runtime.steps.pictures import decoded, layout_of, tower_input
from sinkprune.runtime.steps.prefix_cache import PrefixCache, PrefixKey
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.constraint import Unconstrained
from sinkprune.runtime.writing import choose, write


def generate(
    model: LoadedModel,
    request: Request,
    plan: Plan | None,
    form: Unconstrained | ChoiceTokens,
    new_policy: Callable[[], BudgetPolicy],
    observer: Observer,
    state: StreamState,
    memory: PrefixCache,
) -> Generator[str, None, Answer]:
    """Run a request, and report each step to `observer`; returns and raises what `Pipeline.stream` does.

    Yields the text of each token, which may be empty.

    `plan` is that of the request's budget, and `form` what its answer must be. `new_policy` is called when the first
    piece is requested, because a deadline is counted from then on. What requests about the same pictures share is
    read from and added to `memory`.
    """
    manifest, limits, family, prompts, embedding, chain = model
    backend, policy, sampler = chain.backend, new_policy(), request.new_sampler()
    clock = Stopwatch(backend, observer.during)
    chain.load_plan(plan)
    check_picture_count(manifest, limits, len(request.pictures))
    pictures = [decoded(source, family) for source in request.pictures]

    with clock.measure("ttft"):
        with clock.measure("preprocess"):
            digests = memory.digests(pictures)
            known = [memory.tower(digest) for digest in digests]
            sources = zip(request.pictures, pictures, known, strict=True)
            seen = [
                tower_input(source, picture, family, manifest)
                if tower is None
                else TowerInput({}, layout_of(source, picture, family, manifest))
                for source, picture, tower in sources
            ]
            layouts = [layout for _, layout in seen]
            prompt = prompts.encode(
                request.texts,
                [one.texts for one in layouts],
                request.system,
                request.history,
                request.tools,
                request.tool_call_id,
            )
        observer.seen(seen)
        for layout in layouts:
            warn_if_partly_seen(layout)
        candidates = policy.candidates(manifest, layouts)
        choices = runnable(manifest, limits, request, candidates, prompt.text_tokens, layouts)
        with backend.turn:
            towers = [
                run_tower(chain, inputs, clock) if tower is None else tower
                for (inputs, _), tower in zip(seen, known, strict=True)
            ]
            for digest, tower in zip(digests, towers, strict=True):
                memory.put_tower(digest, tower, tower.norms.size * chain.visual_token_bytes)
            choice = policy.choose(choices, prompt.text_tokens, layouts)
            state.budget, schedule = choice.budget, choice.schedule
            key = PrefixKey.of(chain.segments, schedule.plan, digests, prompt.texts)
            shared = memory.shared(key, prompt.texts[-1])
            encoded = (
                [encode(chain, schedule.plan, tower, clock) for tower in towers]
                if shared is None
                else [*shared.prefix.encoded]
            )
            observer.encoded(encoded)
            shown, pruned = list(zip(layouts, encoded, strict=True)), schedule.plan is not None
            rows = lay_out(backend, embedding, family.between_rows, prompt.texts, shown, pruned=pruned)
            observer.laid_out(rows)
            prefilled = prefill(chain, schedule, rows, clock, encoded[0].device_norms if encoded else None, shared)
            logits: Array = backend.numpy(prefilled.logits)[0]
            # A closed list is compared later.
            ids = [] if isinstance(form, ChoiceTokens) else [sampler(logits, form.allowed(logits.size))]
    policy.first_token()
    observer.prefilled(prefilled)
    for token in ids:
        observer.chose(token, logits)
    with backend.turn:
        kept = kept_tokens(chain, schedule, layouts, encoded, rows, prefilled)
        if memory.stores(key, prompt.texts[-1]):
            memory.put_prefix(key, *prefix_of(chain, schedule.plan, rows, encoded, prompt.texts[-1], prefilled))
    cache, cache_bytes = prefilled.cache, kv_bytes(chain, prefilled.cache)
    layers = [length - prompt.text_tokens for length in prefilled.tokens_per_layer]
    # Embeddings take no memory while the answer is decoded.
    reused_towers, reused_rows = sum(tower is not None for tower in known), shared.rows if shared else 0
    del pictures, seen, known, towers, encoded, shared, shown, rows, prefilled

    if isinstance(form, ChoiceTokens):
        written = yield from choose(model, form, sampler, policy, observer, cache, logits)
    else:
        written = yield from write(model, request, form, sampler, policy, observer, state, cache, ids)

    answer = Answer(
        text=written.text,
        token_ids=written.token_ids,
        finish=written.finish,
        method=request.method,
        budget=choice.budget,
        prompt_tokens=prompt.text_tokens,
        visual_tokens=sum(layout.all_tokens for layout in layouts),
        tokens_per_layer=layers,
        kv_bytes=cache_bytes,
        ms=timings(clock.ms(), written.token_ms, written.other_ms),
        images=kept,
        reused_towers=reused_towers,
        reused_rows=reused_rows,
        deadline=policy.ended(written.token_ms, reused=reused_rows > 0),
        choices=written.choices,
    )
    observer.answered(answer)
    return answer
