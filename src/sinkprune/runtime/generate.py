"""All steps of a request, from pictures and texts to the last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from sinkprune.contract.budgets import AUTO
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import Array
from sinkprune.runtime.deadline.choices import ScheduledBudget, runnable
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.steps.answer import Answer, TriedBudget, timings
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.choice_scores import ChoiceTokens
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.decoding import Prefill, first_logits, kept_tokens, kv_bytes, lead_of, prefill, prefix_of
from sinkprune.runtime.steps.encoding import EncodedPicture, TowerOutput, encode, run_tower
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import decoded, layout_of, tower_input
from sinkprune.runtime.steps.prefix_cache import ANY_SIZE, LeadKey, Prefix, PrefixCache, PrefixKey
from sinkprune.runtime.steps.prompt_rows import PromptRows, lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.constraint import Unconstrained
from sinkprune.runtime.text.prompt import Prompt
from sinkprune.runtime.writing import choose, write


@dataclass(frozen=True)
class _Seen:
    """What a request needs at any budget."""

    digests: tuple[bytes, ...]
    layouts: list[VisualLayout]
    prompt: Prompt
    towers: list[TowerOutput]
    request: Request


@dataclass(frozen=True)
class _Run:
    """A prompt after the prefill at one budget."""

    choice: ScheduledBudget
    key: PrefixKey
    lead_key: LeadKey
    encoded: list[EncodedPicture]
    rows: PromptRows
    prefilled: Prefill
    logits: Array
    """[vocab], of the first token."""
    reused_rows: int
    knew_pictures: bool
    """Whether they include rows of the pictures."""
    new_lead: bool
    """Whether the text before the first picture is worth storing."""


def generate(
    model: LoadedModel,
    request: Request,
    plans: Sequence[Plan | None],
    form: Unconstrained | ChoiceTokens,
    new_policy: Callable[[], BudgetPolicy],
    observer: Observer,
    state: StreamState,
    memory: PrefixCache,
) -> Generator[str, None, Answer]:
    """Run a request, and report each step to `observer`; returns and raises what `Pipeline.stream` does.

    Yields the text of each token, which may be empty.

    `model` is that of `LoadedModel.for_request`, `plans` are those of the request's budget or budgets, and `form` is
    what its answer must be. `new_policy` is called when the first piece is requested, because a deadline is counted
    from then on. What requests about the same pictures share is read from and added to `memory`. Steps of one request
    share it too.
    """
    manifest, limits, family, prompts, _, chain, warnings = model
    backend, policy = chain.backend, new_policy()
    clock, own = Stopwatch(backend, observer.during), PrefixCache(ANY_SIZE)
    for plan in plans:
        chain.load_plan(plan)
    uses = chain.first_uses
    check_picture_count(manifest, limits, len(request.pictures))
    pictures = [decoded(source, family) for source in request.pictures]

    with clock.measure("ttft"):
        with clock.measure("preprocess"):
            digests = memory.digests(pictures, plans[0].picture_share if plans[0] else None)
            known = [memory.tower(digest) for digest in digests]
            inputs = [
                tower_input(source, picture, family, manifest)
                if tower is None
                else TowerInput({}, layout_of(source, picture, family, manifest))
                for source, picture, tower in zip(request.pictures, pictures, known, strict=True)
            ]
            layouts = [layout for _, layout in inputs]
            prompt = prompts.encode(
                request.texts,
                [one.texts for one in layouts],
                request.system,
                request.history,
                request.tools,
                request.tool_call_id,
            )
        observer.seen(inputs)
        warnings.warn(pictures, layouts)
        candidates = policy.candidates(manifest, layouts)
        choices = runnable(manifest, limits, request, candidates, prompt.text_tokens, layouts)
        with backend.turn:
            towers = [
                run_tower(chain, arrays, clock) if tower is None else tower
                for (arrays, _), tower in zip(inputs, known, strict=True)
            ]
            for digest, tower in zip(digests, towers, strict=True):
                memory.put_tower(digest, tower, tower.norms.size * chain.visual_token_bytes)
            seen = _Seen(digests, layouts, prompt, towers, request)
            choice = policy.choose(choices, prompt.text_tokens, layouts)
            run, sampler = _run(model, seen, choice, clock, observer, own, memory), request.new_sampler()
            # A closed list is compared later.
            ids = [] if isinstance(form, ChoiceTokens) else [sampler(run.logits, form.allowed(run.logits.size))]
    reused_towers = sum(tower is not None for tower in known)
    del pictures, known, inputs, towers

    tried: list[TriedBudget] = []
    # Milliseconds from the first tokens of earlier steps to the next steps, and of all earlier steps.
    between, earlier = 0.0, 0.0
    while True:
        began = time.perf_counter()
        policy.first_token()
        observer.prefilled(run.prefilled)
        for token in ids:
            observer.chose(token, run.logits)
        choice, logits = run.choice, run.logits
        reused_rows, knew_pictures = run.reused_rows, run.knew_pictures
        state.budget = choice.budget
        with backend.turn:
            kept = kept_tokens(chain, choice.schedule, layouts, run.encoded, run.rows, run.prefilled)
            if memory.stores(run.key, prompt.texts[-1]):
                memory.put_prefix(run.key, *_prefix(chain, prompt, run))
            if run.new_lead:
                memory.put_lead(run.lead_key, *lead_of(chain, len(run.lead_key.text), run.prefilled))
        cache, cache_bytes = run.prefilled.cache, kv_bytes(chain, run.prefilled.cache)
        layers = [length - prompt.text_tokens for length in run.prefilled.tokens_per_layer]
        if not isinstance(form, ChoiceTokens):
            # Embeddings take no memory while the answer is decoded.
            del seen, run
            written = yield from write(model, request, form, sampler, policy, observer, state, cache, ids)
            break
        written = choose(model, form, sampler, policy, observer, cache, logits)
        confidence = max(written.choices.values())
        following, took = policy.following(choice, confidence), (time.perf_counter() - began) * 1e3
        if following is not None:
            # A server answers other requests meanwhile.
            yield ""
        if following is None or state.cancelled:
            written = written if following is None else replace(written, finish="cancelled")
            yield written.text
            break
        between += took
        ms = clock.ms()["ttft"] + between - earlier
        tried.append(TriedBudget(choice.budget, confidence, written.choices, reused_rows, ms))
        earlier += ms
        with clock.measure("ttft"), backend.turn:
            known_rows = memory.shared(run.key, prompt.texts[-1])
            if known_rows is None or known_rows[1] < run.rows.length:
                own.put_prefix(run.key, *_prefix(chain, prompt, run))
            run, sampler = _run(model, seen, following, clock, observer, own, memory), request.new_sampler()

    spent = clock.ms()
    times = timings({**spent, "ttft": spent["ttft"] + between}, written.token_ms, written.other_ms)
    if request.budget == AUTO:
        last = (times["latency"] or 0.0) - earlier
        tried.append(TriedBudget(choice.budget, confidence, written.choices, reused_rows, last))
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
        ms=times,
        images=kept,
        reused_towers=reused_towers,
        reused_rows=reused_rows,
        deadline=policy.ended(written.token_ms, comparable=not knew_pictures and chain.first_uses == uses),
        choices=written.choices,
        tried=tuple(tried),
    )
    observer.answered(answer)
    return answer


def _run(
    model: LoadedModel,
    seen: _Seen,
    choice: ScheduledBudget,
    clock: Stopwatch,
    observer: Observer,
    own: PrefixCache,
    memory: PrefixCache,
) -> _Run:
    """Run the steps from the sanitizer to the first logits at one budget, without rows that `own` or `memory` has."""
    manifest, _, family, _, embedding, chain, _ = model
    backend, schedule, texts = chain.backend, choice.schedule, seen.prompt.texts
    question = model.question_ids(schedule.plan, seen.request, seen.prompt)
    key = PrefixKey.of(manifest, schedule.plan, seen.digests, texts, question)
    lead_key = LeadKey.of(manifest, schedule.plan, texts)
    stored, new_lead = [*memory.lead(lead_key)], memory.stores_lead(lead_key)
    shared = own.shared(key, texts[-1]) or memory.shared(key, texts[-1])
    if shared is None:
        words = backend.tensor(embedding(question)) if question else None
        encoded = [encode(chain, schedule.plan, tower, clock, words) for tower in seen.towers]
    else:
        prefix, rows_shared = shared
        encoded = [*prefix.encoded]
        stored[: len(prefix.saved)] = prefix.stored(rows_shared)
    observer.encoded(encoded)
    schedule = schedule.with_rows([one.kept_index.size for one in encoded])
    shown, pruned = list(zip(seen.layouts, encoded, strict=True)), schedule.plan is not None
    rows = lay_out(backend, embedding, family.between_rows, texts, shown, pruned=pruned)
    observer.laid_out(rows)
    norms, lead = encoded[0].device_norms if encoded else None, len(lead_key.text) if new_lead else 0
    prefilled = prefill(chain, schedule, rows, clock, norms, stored, lead)
    logits: Array = backend.numpy(first_logits(chain, prefilled, clock))[0]
    choice = choice._replace(schedule=prefilled.schedule or schedule)
    reused = stored[0].rows if stored else 0
    return _Run(choice, key, lead_key, encoded, rows, prefilled, logits, reused, shared is not None, new_lead)


def _prefix(chain: Chain, prompt: Prompt, run: _Run) -> tuple[Prefix, int]:
    """Return what later prompts about the same pictures may share with a run, and its bytes."""
    return prefix_of(chain, run.choice.schedule.plan, run.rows, run.encoded, prompt.texts[-1], run.prefilled)
