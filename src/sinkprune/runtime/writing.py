"""Writes the text of an answer after its prompt, token by token."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sinkprune.contract.precision import Array
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.answer_tokens import AnswerText, Sampler, not_finite

if TYPE_CHECKING:
    from sinkprune.runtime.hooks import Hooks


class Draft(NamedTuple):
    """An answer after its prompt."""

    model: LoadedModel
    request: Request
    hooks: Hooks
    state: StreamState
    sampler: Sampler
    cache: KVCache
    """Of the prompt; it grows with the answer."""
    logits: Array
    """[vocab], of the first token."""
    ids: list[int]
    """The first token, if it is written token by token."""


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


def write(draft: Draft) -> Generator[str, None, Written]:
    """Write an answer, one token after the other; yields the text of each."""
    model, request, hooks, state, sampler, cache, _, ids = draft
    chain, tokens, budgets = model.chain, hooks.tokens, hooks.budgets
    token, token_ms, text_ms = ids[-1], list[float](), 0.0
    # A constraint allows no stop token too early.
    ignored = 0 if request.follows_grammar else request.min_new_tokens
    text = AnswerText(model.prompts.tokenizer, model.manifest.tokens.stop, request.stop, ignored)
    while True:
        began = time.perf_counter()
        tokens.accept(token)
        piece = text.add(token)
        finish = "stop" if text.stopped or tokens.complete else budgets.finish(len(ids))
        if finish:
            piece += text.end()
        text_ms += ms_since(began)
        yield piece
        # After the piece, because its reader takes time, and may cancel.
        if not finish and (finish := "cancelled" if state.cancelled else budgets.finish(len(ids))):
            yield text.end()
        if finish:
            break
        began = time.perf_counter()
        allowed = tokens.allowed(chain.model.vocab_size)
        with chain.backend.turn, hooks.seen.during("decode"):
            scores = decode_one_token(chain, cache, model.embedding([token])[0])
            if allowed is None and sampler.is_greedy and not hooks.seen.reads_logits:
                # Only the token crosses from the device.
                token, finite = chain.backend.best(scores)
                logits = None
            else:
                logits, finite = chain.backend.numpy(scores)[0], True
        if not finite:
            raise not_finite()
        if logits is not None:
            token = sampler(logits, allowed)
        token_ms.append(ms_since(began))
        ids.append(token)
        if logits is not None:
            hooks.seen.chose(token, logits)
    return Written(text.text, ids, finish, token_ms, text_ms)


def ms_since(start: float) -> float:
    """Return the milliseconds since `start`, by `time.perf_counter`."""
    return (time.perf_counter() - start) * 1e3
