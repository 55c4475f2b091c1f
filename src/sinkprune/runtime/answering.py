"""The steps of a request: from pictures and texts to the last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Tensor
from sinkprune.runtime.deadline.choices import choices
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import Family
from sinkprune.runtime.steps.answer import Answer, Kept, timings
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.context_length import check_number
from sinkprune.runtime.steps.decoding import Prefill, decode_one_token, kept_tokens, kv_bytes, prefill
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.encoding import encode, look
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import decoded, see
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.answer_text import AnswerText
from sinkprune.runtime.text.prompt import PromptEncoder
from sinkprune.runtime.text.sampling import Sampler
from sinkprune.runtime.text.stop_strings import StopStrings


class Parts(NamedTuple):
    """The parts of a loaded bundle that a request runs on."""

    manifest: Manifest
    limits: Limits | None
    family: Family
    prompts: PromptEncoder
    embedding: Embedding
    chain: Chain


def steps(
    parts: Parts, request: Request, new_policy: Callable[[], BudgetPolicy], observer: Observer, state: StreamState
) -> Generator[str, None, Answer]:
    """Run a request, each step reported to `observer`; yields, returns and raises what `Pipeline.stream` does.

    `new_policy` is called when the first piece is requested, because a deadline is counted from then on.
    """
    sampler, stop, policy = request.new_sampler(), parts.manifest.tokens.stop, new_policy()
    chain, backend = parts.chain, parts.chain.backend
    start = _start(parts, request, policy, sampler, observer, state)
    # Before decoding fills the caches
    cache_bytes = kv_bytes(chain, start.prefill.cache)
    token, ids, times, texts = start.token, [start.token], list[float](), list[float]()
    text, strings, finish, said = AnswerText(parts.prompts.tokenizer), StopStrings(request.stop), "", ""
    while True:
        began = time.perf_counter()
        stopped = token in stop and len(ids) > request.min_new_tokens
        piece = "" if stopped else text.add(token)
        if len(ids) > request.min_new_tokens:
            piece = strings.add(piece)
            stopped = stopped or strings.found
        finish = "stop" if stopped else "" if policy.goes_on(len(ids)) else policy.finish(len(ids))
        piece += _rest(text, strings) if finish else ""
        finish = "stop" if strings.found else finish
        texts.append(_ms_since(began))
        said += piece
        if piece:
            yield piece
        # Checked here, because a reader may cancel while it has the piece.
        if not finish and state.cancelled:
            finish, piece = "cancelled", _rest(text, strings)
            said += piece
            if piece:
                yield piece
        if finish:
            break
        began = time.perf_counter()
        with backend.turn, observer.during("decode"):
            logits = _on_host(chain, decode_one_token(chain, start.prefill.cache, parts.embedding([token])[0]))
        token = sampler(logits)
        times.append(_ms_since(began))
        ids.append(token)
        observer.chose(token, logits)
    answer = Answer(
        text=said,
        token_ids=ids,
        finish=finish,
        method=request.method,
        budget=start.budget,
        prompt_tokens=start.text_tokens,
        visual_tokens=sum(kept.layout.all_tokens for kept in start.kept),
        tokens_per_layer=[tokens - start.text_tokens for tokens in start.prefill.tokens_per_layer],
        kv_bytes=cache_bytes,
        ms=timings(start.clock.ms(), times, sum(texts)),
        images=start.kept,
        deadline=policy.ended(times),
    )
    observer.answered(answer)
    return answer


@dataclass(frozen=True)
class _Start:
    """A request whose first token is there."""

    clock: Stopwatch
    prefill: Prefill
    kept: tuple[Kept, ...]
    text_tokens: int
    token: int
    budget: str


def _start(
    parts: Parts, request: Request, policy: BudgetPolicy, sampler: Sampler, observer: Observer, state: StreamState
) -> _Start:
    """Everything up to the first token: from decoded pictures on it is what TTFT measures."""
    manifest, limits, family, prompts, embedding, chain = parts
    backend = chain.backend
    clock = Stopwatch(backend, observer.during)
    chain.load_plan(manifest.plan(request.method, request.budget))
    check_number(manifest, limits, len(request.pictures))
    pictures = [decoded(source, family) for source in request.pictures]
    with clock.measure("ttft"):
        with clock.measure("preprocess"):
            pairs = zip(request.pictures, pictures, strict=True)
            seen = [see(source, picture, family, manifest) for source, picture in pairs]
            layouts = [layout for _, layout in seen]
            prompt = prompts.encode(request.texts, [layout.texts for layout in layouts], request.system)
        observer.seen(seen)
        budgets, text = policy.budgets(manifest, layouts), prompt.text_tokens
        possible = choices(manifest, limits, request, budgets, text, layouts)
        with backend.turn:
            towers = [look(chain, inputs, clock) for inputs, _ in seen]
            budget, planned = policy.choose(possible, text, layouts)
            state.budget = budget
            encoded = [encode(chain, planned.plan, tower, clock) for tower in towers]
            observer.encoded(encoded)
            shown, pruned = list(zip(layouts, encoded, strict=True)), planned.plan is not None
            rows = lay_out(backend, embedding, family.between_rows, prompt.texts, shown, pruned=pruned)
            observer.laid_out(rows)
            result = prefill(chain, planned, rows, clock, encoded[0].device_norms)
            logits = _on_host(chain, result.logits)
            token = sampler(logits)
    policy.first_token()
    observer.prefilled(result)
    observer.chose(token, logits)
    # What is kept for the answer is on the host: embeddings need no memory while it decodes.
    with backend.turn:
        kept = kept_tokens(chain, planned, layouts, encoded, rows, result)
    return _Start(clock, result, kept, prompt.text_tokens, token, budget)


def _rest(text: AnswerText, strings: StopStrings) -> str:
    """What waited for tokens that will not come."""
    return strings.add(text.end()) + strings.end()


def _on_host(chain: Chain, logits: Tensor) -> Array:
    """[vocab] on the host."""
    return chain.backend.numpy(logits)[0]


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
