"""All steps of a request, from pictures and texts to the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator

from sinkprune.contract.plans import Plan
from sinkprune.runtime.budget_run import SeenPrompt, run_budget
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.media.picture_warnings import facts_of
from sinkprune.runtime.steps.answer import Answer, timings
from sinkprune.runtime.steps.choice_scores import ChoiceTokens
from sinkprune.runtime.steps.context_length import check_picture_count, runnable
from sinkprune.runtime.steps.encoding import TowerOutput, run_tower
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.prefix_cache import PrefixCache
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
    prefixes: PrefixCache,
) -> Generator[str | None, None, Answer]:
    """Run a request, and report each step to `observer`; returns and raises what `Pipeline.stream` does.

    Yields the text of each token, which may be empty, and None between other passes, so that a server answers other
    requests meanwhile.

    `model` is that of `LoadedModel.for_request`, `plan` that of the request's budget, and `form` is what its answer
    must be. `new_policy` is called when the first piece is requested, because a deadline is counted from then on.
    What requests about the same pictures share is read from `prefixes` and added to it.
    """
    family, chain, backend, policy = model.family, model.chain, model.chain.backend, new_policy()
    clock = Stopwatch(backend, observer.during)
    chain.load_plan(plan)
    uses = chain.first_uses
    check_picture_count(model.manifest, model.limits, len(request.pictures))
    model.check_text_length(request)
    share = plan.picture_share if plan else None
    digests, known, seen_inputs = list[bytes](), list[TowerOutput | None](), list[TowerInput]()
    for place, source in enumerate(request.pictures):
        # One after the other, because the pixels of a large picture take hundreds of MB.
        picture = decoded(source, family)
        with clock.measure("ttft"), clock.measure("preprocess"):
            digests.append(prefixes.digest(place, picture, share))
            known.append(prefixes.tower(digests[-1]))
            inputs = {} if known[-1] is not None else family.inputs(picture)
            seen_inputs.append(TowerInput(inputs, family.layout(picture), facts_of(picture)))
        del picture, inputs
    layouts = [each.layout for each in seen_inputs]
    with clock.measure("ttft"), clock.measure("preprocess"):
        prompt = model.encode_prompt(request, layouts)
    observer.seen(seen_inputs)
    model.warnings.warn(layouts, [each.file for each in seen_inputs])
    candidates = policy.candidates(layouts)
    possible = runnable(model.manifest, model.limits, request, candidates, prompt.text_tokens, layouts)
    # A server runs the steps up to here beside those of other requests.
    yield None

    with clock.measure("ttft"), backend.turn:
        # An earlier request about the same picture may have run since.
        known = [tower or prefixes.tower(digest) for tower, digest in zip(known, digests, strict=True)]
        towers = [
            run_tower(chain, own.inputs, clock) if tower is None else tower
            for own, tower in zip(seen_inputs, known, strict=True)
        ]
        for digest, tower in zip(digests, towers, strict=True):
            prefixes.put(digest, tower, tower.norms.size * chain.visual_token_bytes)
        reused_towers = sum(tower is not None for tower in known)
        del known, seen_inputs
        seen = SeenPrompt(request, prompt, layouts, digests, towers)
        planned = policy.choose(possible, prompt.text_tokens)
        run = run_budget(model, seen, planned, clock, observer, prefixes)
        sampler = model.new_sampler(request, prompt, layouts)
        # A closed list is compared later.
        ids = [] if isinstance(form, ChoiceTokens) else [sampler(run.logits, form.allowed(run.logits.size))]
    del towers

    policy.first_token()
    observer.prefilled(run.prefilled)
    for token in ids:
        observer.chose(token, run.logits)
    with backend.turn:
        report = run.report(chain)
        run.store(chain, prefixes)
    state.budget, cache, logits = report.budget, run.prefilled.cache, run.logits
    # Embeddings take no memory while the answer is decoded.
    del seen, run
    if isinstance(form, ChoiceTokens):
        written = yield from choose(model, form, sampler, policy, observer, state, cache, logits)
        yield written.text
    else:
        written = yield from write(model, request, form, sampler, policy, observer, state, cache, ids)

    # Before the deadline's clock stops: a cache of openvino is freed only when no other thread runs the model.
    del cache
    answer = Answer(
        text=written.text,
        token_ids=written.token_ids,
        finish=written.finish,
        method=request.method,
        budget=report.budget,
        prompt_tokens=prompt.text_tokens,
        visual_tokens=sum(layout.all_tokens for layout in layouts),
        tokens_per_layer=report.tokens_per_layer,
        kv_bytes=report.kv_bytes,
        ms=timings(clock.ms(), written.token_ms, written.other_ms),
        images=report.images,
        reused_towers=reused_towers,
        reused_rows=report.reused_rows,
        deadline=policy.ended(written.token_ms, comparable=not report.knew_pictures and chain.first_uses == uses),
        choices=written.choices,
    )
    observer.answered(answer)
    return answer
