"""The text of an answer after its prompt: written token by token, or chosen from a closed list."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field

from sinkprune.contract.precision import Array
from sinkprune.runtime.deadline.policy import BudgetPolicy
from sinkprune.runtime.steps.choice_scores import ChoiceScores, ChoiceTokens, score_choices
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.answer_text import AnswerText
from sinkprune.runtime.text.constraint import Unconstrained
from sinkprune.runtime.text.sampling import Sampler


@dataclass(frozen=True)
class Written:
    """The text of an answer, and the time that it took after the prompt."""

    text: str
    token_ids: list[int]
    finish: str
    """As `Answer.finish`."""
    token_ms: list[float]
    """The milliseconds of each token after the first."""
    other_ms: float
    """All other milliseconds: decoding tokens to text, or comparing a closed list."""
    choices: dict[str, float] = field(default_factory=dict)
    """As `Answer.choices`."""


def write(
    model: LoadedModel,
    request: Request,
    constraint: Unconstrained,
    sampler: Sampler,
    policy: BudgetPolicy,
    observer: Observer,
    state: StreamState,
    cache: KVCache,
    ids: list[int],
) -> Generator[str, None, Written]:
    """Write an answer, one token after the other; yields the text of each. `ids` has the first token."""
    manifest, chain = model.manifest, model.chain
    token, token_ms, text_ms = ids[-1], list[float](), 0.0
    # A constraint allows no stop token too early.
    ignored = 0 if request.follows_grammar else request.min_new_tokens
    text = AnswerText(model.prompts.tokenizer, manifest.tokens.stop, request.stop, ignored)
    while True:
        began = time.perf_counter()
        constraint.accept(token)
        piece = text.add(token)
        finish = "stop" if text.stopped or constraint.complete else policy.finish(len(ids))
        if finish:
            piece += text.end()
            finish = "stop" if text.stopped else finish
        text_ms += _ms_since(began)
        yield piece
        # After the piece, because its reader takes time, and may cancel.
        if not finish and (finish := "cancelled" if state.cancelled else policy.finish(len(ids))):
            yield text.end()
        if finish:
            break
        began = time.perf_counter()
        with chain.backend.turn, observer.during("decode"):
            logits: Array = chain.backend.numpy(decode_one_token(chain, cache, model.embedding([token])[0]))[0]
        token = sampler(logits, constraint.allowed(logits.size))
        token_ms.append(_ms_since(began))
        ids.append(token)
        observer.chose(token, logits)
    return Written(text.text, ids, finish, token_ms, text_ms)


def choose(
    model: LoadedModel,
    choices: ChoiceTokens,
    sampler: Sampler,
    policy: BudgetPolicy,
    observer: Observer,
    state: StreamState,
    cache: KVCache,
    logits: Array,
) -> Generator[None, None, Written]:
    """Return an answer chosen from a closed list, after a prompt with these `logits` [vocab]; yields between passes.

    The likeliest is chosen, or one is sampled. If a deadline or `Stream.cancel` comes before all tokens are scored,
    the first token of each answer decides.
    """
    began = time.perf_counter()
    scores, paused_ms = yield from _timed(
        score_choices(
            model.chain,
            model.embedding,
            cache,
            logits,
            choices,
            observer,
            lambda passes: "cancelled" if state.cancelled else policy.finish(passes),
        )
    )
    number = sampler(scores.log_probabilities)
    ids, text = [*choices.ids[number]], choices.texts[number]
    probabilities = dict(zip(choices.texts, scores.probabilities, strict=True))
    took = _ms_since(began) - paused_ms
    observer.chose(ids[0], logits)
    return Written(text, ids, scores.cut or "stop", [], took, probabilities)


def _timed(passes: Generator[None, None, ChoiceScores]) -> Generator[None, None, tuple[ChoiceScores, float]]:
    """Yield where `passes` yields; return its result, and the milliseconds of others between."""
    others_ms = 0.0
    while True:
        try:
            next(passes)
        except StopIteration as end:
            return end.value, others_ms
        since = time.perf_counter()
        yield
        others_ms += _ms_since(since)


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
