"""All steps of a request, from pictures and texts to the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial

from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.hooks import Hooks
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.recipe import look, run_prompt
from sinkprune.runtime.steps.answer import Answer, timings
from sinkprune.runtime.steps.context_length import check_picture_count, runnable
from sinkprune.runtime.steps.decoding import first_logits
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.writing import Draft


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
            prompt_tokens=prompt.text_tokens,
            visual_tokens=sum(layout.all_tokens for layout in layouts),
            reused_towers=rows.reused_towers,
            **run.reported(chain),
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
