"""All steps of a request, from pictures and texts to the last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from sinkprune.contract.plans import Plan
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Tensor
from sinkprune.runtime.deadline.choices import runnable
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.answer import Answer, timings
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.context_length import check_number
from sinkprune.runtime.steps.decoding import decode_one_token, kept_tokens, kv_bytes, prefill
from sinkprune.runtime.steps.encoding import encode, run_tower
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import decoded, see
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.answer_text import AnswerText


def generate(
    model: LoadedModel,
    request: Request,
    plan: Plan | None,
    new_policy: Callable[[], BudgetPolicy],
    observer: Observer,
    state: StreamState,
) -> Generator[str, None, Answer]:
    """Run a request, and report each step to `observer`; yields, returns and raises what `Pipeline.stream` does.

    `plan` is that of the request's budget. `new_policy` is called when the first piece is requested, because a
    deadline is counted from then on.
    """
    manifest, limits, family, prompts, embedding, chain = model
    backend, policy, sampler = chain.backend, new_policy(), request.new_sampler()
    clock = Stopwatch(backend, observer.during)
    chain.load_plan(plan)
    check_number(manifest, limits, len(request.pictures))
    pictures = [decoded(source, family) for source in request.pictures]

    with clock.measure("ttft"):
        with clock.measure("preprocess"):
            sources = zip(request.pictures, pictures, strict=True)
            seen = [see(source, picture, family, manifest) for source, picture in sources]
            layouts = [layout for _, layout in seen]
            prompt = prompts.encode(request.texts, [layout.texts for layout in layouts], request.system)
        observer.seen(seen)
        candidates = policy.candidates(manifest, layouts)
        choices = runnable(manifest, limits, request, candidates, prompt.text_tokens, layouts)
        with backend.turn:
            towers = [run_tower(chain, inputs, clock) for inputs, _ in seen]
            choice = policy.choose(choices, prompt.text_tokens, layouts)
            state.budget, schedule = choice.budget, choice.schedule
            encoded = [encode(chain, schedule.plan, tower, clock) for tower in towers]
            observer.encoded(encoded)
            shown, pruned = list(zip(layouts, encoded, strict=True)), schedule.plan is not None
            rows = lay_out(backend, embedding, family.between_rows, prompt.texts, shown, pruned=pruned)
            observer.laid_out(rows)
            start = prefill(chain, schedule, rows, clock, encoded[0].device_norms)
            logits = _on_host(chain, start.logits)
            token = sampler(logits)
    policy.first_token()
    observer.prefilled(start)
    observer.chose(token, logits)
    with backend.turn:
        kept = kept_tokens(chain, schedule, layouts, encoded, rows, start)
    cache, cache_bytes = start.cache, kv_bytes(chain, start.cache)
    layers = [length - prompt.text_tokens for length in start.tokens_per_layer]
    # Embeddings take no memory while the answer is decoded.
    del pictures, seen, towers, encoded, shown, rows, start

    ids, token_ms, text_ms = [token], list[float](), 0.0
    text = AnswerText(prompts.tokenizer, manifest.tokens.stop, request.stop, request.min_new_tokens)
    while True:
        began = time.perf_counter()
        piece = text.add(token)
        finish = "stop" if text.stopped else policy.finish(len(ids))
        if finish:
            piece += text.end()
            finish = "stop" if text.stopped else finish
        text_ms += _ms_since(began)
        if piece:
            yield piece
        # After the piece, because its reader may cancel.
        if not finish and state.cancelled:
            finish = "cancelled"
            if piece := text.end():
                yield piece
        if finish:
            break
        began = time.perf_counter()
        with backend.turn, observer.during("decode"):
            logits = _on_host(chain, decode_one_token(chain, cache, embedding([token])[0]))
        token = sampler(logits)
        token_ms.append(_ms_since(began))
        ids.append(token)
        observer.chose(token, logits)

    answer = Answer(
        text=text.text,
        token_ids=ids,
        finish=finish,
        method=request.method,
        budget=choice.budget,
        prompt_tokens=prompt.text_tokens,
        visual_tokens=sum(layout.all_tokens for layout in layouts),
        tokens_per_layer=layers,
        kv_bytes=cache_bytes,
        ms=timings(clock.ms(), token_ms, text_ms),
        images=kept,
        deadline=policy.ended(token_ms),
    )
    observer.answered(answer)
    return answer


def _on_host(chain: Chain, logits: Tensor) -> Array:
    """Return the logits [vocab] on the host."""
    return chain.backend.numpy(logits)[0]


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
