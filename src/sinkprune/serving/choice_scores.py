"""Scores of a closed list of answers: the log probability that the model gives to each."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.hooks import Tokens
from sinkprune.runtime.steps.decoding import KVCache
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.steps.scored_rows import logits_of_rows
from sinkprune.runtime.text.answer_tokens import Sampler, check_finite
from sinkprune.runtime.text.prompt import PromptEncoder
from sinkprune.runtime.writing import Draft, Written, ms_since

_Ids = tuple[int, ...]
# The most tokens of a pass that run before others may: each takes as long as a token of an answer.
_AT_ONCE = 32


@dataclass(frozen=True)
class ChoiceTokens(Tokens):
    """A closed list of answers in tokens, of which one is chosen by its probability.

    The probability of an answer is the product of those of its tokens. If the tokens of one answer begin another, as
    "red" begins "red cup", a stop token after each answer counts too. Otherwise "red" would never be less likely than
    "red cup".
    """

    texts: tuple[str, ...]
    ids: tuple[_Ids, ...]
    """The tokens of each text, at least one, without a stop token."""
    stop: tuple[int, ...]
    """The tokens that end an answer."""

    @property
    def stop_counts(self) -> bool:
        """Whether a stop token after each answer counts."""
        return len(_longest(self.ids)) < len(self.ids)

    @property
    def passes(self) -> list[_Ids]:  # type: ignore[override]
        """The tokens that run through the decoder after the prompt, in so many passes.

        The last token of an answer only runs if a stop token counts. Tokens that begin another pass need none.
        """
        return _longest(self.ids if self.stop_counts else [ids[:-1] for ids in self.ids])

    def first(self, sampler: Sampler, logits: Array) -> list[int]:
        return []

    def write(self, draft: Draft) -> Generator[str | None, None, Written]:
        """Choose the likeliest answer, or sample one; yields between passes, and its text at the end.

        If a deadline or `Stream.cancel` comes before all tokens are scored, the first token of each answer decides.
        """
        began = time.perf_counter()
        scores, cut, paused_ms = yield from self._score(draft)
        number = draft.sampler(scores)
        ids, text = [*self.ids[number]], self.texts[number]
        shares = np.exp(scores - scores.max())
        probabilities = dict(zip(self.texts, (shares / shares.sum()).tolist(), strict=True))
        took = ms_since(began) - paused_ms
        draft.hooks.seen.chose(ids[0], draft.logits)
        yield text
        return Written(text, ids, cut or "stop", [], took, probabilities)

    def _score(self, draft: Draft) -> Generator[None, None, tuple[Array, str, float]]:
        """Score each answer after the prompt of `draft`, whose cache may grow; raises `NumericsError`.

        Yields before each part of a pass, because a server answers other requests meanwhile. Returns the log
        probabilities [choices] float64, not normalised, because the model may give other answers too; why only the
        first token of each answer counts, or ""; and the milliseconds of others.
        """
        chain, cache = draft.model.chain, draft.cache
        scores, scored, others_ms = np.zeros(len(self.ids)), set[_Ids](), 0.0
        passes, stop = self.passes, self.stop if self.stop_counts else ()

        def count(prefix: _Ids, begun: Sequence[int], logits: Array) -> None:
            """Add the probability of what follows `prefix`, with these `logits`, to the answers that it begins."""
            if prefix not in scored:
                scored.add(prefix)
                check_finite(logits)
                for number in begun:
                    following = self.ids[number][len(prefix) : len(prefix) + 1] or stop
                    scores[number] += _log_probability(logits, following) if following else 0.0

        count((), range(len(self.ids)), draft.logits)
        first = scores.copy()
        with chain.backend.turn:
            saved = [
                decoder.save(own, own.length) if len(passes) > 1 else None
                for decoder, own in zip(chain.decoders, cache.segments, strict=True)
            ]
        lengths, positions = cache.lengths, [*cache.next_positions]
        for number, tokens in enumerate(passes, 1):
            own, at_once = cache, _AT_ONCE if chain.resumes else 1
            begun: Sequence[int] = range(len(self.ids))
            for start in range(0, len(tokens), at_once):
                since = time.perf_counter()
                yield
                others_ms += ms_since(since)
                if reason := "cancelled" if draft.state.cancelled else draft.hooks.budgets.finish(number):
                    return first, reason, others_ms
                with chain.backend.turn, draft.hooks.seen.during("decode"):
                    if start == 0 and number < len(passes):
                        parts = zip(chain.decoders, saved, lengths, strict=True)
                        restored = [decoder.restore(one, rows, rows + len(tokens)) for decoder, one, rows in parts]
                        own = KVCache(restored, [*positions])
                    some = draft.model.embedding(tokens[start : start + at_once])
                    for place, following in enumerate(logits_of_rows(chain, own, some), start + 1):
                        begun = [
                            one for one in begun if self.ids[one][place - 1 : place] == tokens[place - 1 : place]
                        ]
                        count(tokens[:place], begun, following)
                    if start + at_once >= len(tokens):
                        # Others may need its memory meanwhile.
                        own = cache
        return scores, "", others_ms


class ChoiceForm:
    """Makes the hook of requests with a closed list."""

    def __init__(self, prompts: PromptEncoder, stop: Sequence[int]) -> None:
        """Use the tokenizer of `prompts`; `stop` are the model's stop tokens."""
        self._prompts, self._stop = prompts, stop

    def __call__(self, request: Request) -> tuple[Request, ChoiceTokens]:
        """Return the request with the length of its longest answer, and its hook."""
        ids = tuple(tuple(self._prompts.answer_ids(text)) for text in request.choice)
        choices = ChoiceTokens(tuple(request.choice), ids, tuple(self._stop))
        return replace(request, max_new_tokens=max(map(len, ids)), min_new_tokens=0), choices


def _log_probability(logits: Array, tokens: Sequence[int]) -> float:
    """Return the log probability that one of `tokens` comes next."""
    below_best = logits.astype(np.float64) - logits.max()
    return float(np.logaddexp.reduce(below_best[list(tokens)]) - np.log(np.exp(below_best).sum()))


def _longest(sequences: Sequence[_Ids]) -> list[_Ids]:
    """Return the sequences that begin no other, without repetitions and empty ones, sorted."""
    ordered = sorted(set(sequences))
    pairs = zip(ordered, [*ordered[1:], ()], strict=True)
    return [one for one, following in pairs if following[: len(one)] != one]
