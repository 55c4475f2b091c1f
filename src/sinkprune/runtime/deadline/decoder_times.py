"""Measures the decoder alone: prefills of several lengths, segment by segment, and tokens after them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from sinkprune.contract.costs.model import Curve, fit_measured
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.choice_scores import logits_of_rows
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.embedding import Embedding

_TOKENS = 8
"""The number of tokens after each prefill."""
_PASS = 8
"""The rows of a pass after them, as for an answer of a closed list."""
_START = 4
"""How many of them are at the start (`Costs.token_start`)."""


class DecoderTimes:
    """Milliseconds of the decoder on rows of text; the time does not depend on the content of rows."""

    def __init__(self, chain: Chain, embedding: Embedding, counts: Sequence[int]) -> None:
        """Prepare prefills of each of `counts` rows."""
        self._chain, self._counts = chain, sorted(counts)
        rows = embedding(range(min(max(counts), chain.model.vocab_size)))
        self._rows: Array = np.resize(rows, (max(counts), rows.shape[1]))
        self.prefills: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        """By count of rows: the milliseconds of each prefill in each segment."""
        self.tokens: dict[int, list[list[float]]] = defaultdict(list)
        """By count of rows: the milliseconds of the tokens after each prefill, with the head."""
        self._rows_of_passes: list[float] = []
        """The milliseconds of each row after the first, in passes over `_PASS` rows after the tokens."""

    def run(self, *, counted: bool) -> None:
        """Run a prefill of each count, and tokens after it; store the times if `counted`."""
        for count in self._counts:
            self._run(count, counted=counted)
        # Reverse the order, so that neither a larger nor a smaller predecessor favours a count.
        self._counts.reverse()

    @property
    def segments(self) -> tuple[Curve, ...]:
        """For each segment: the time of a prefill by its number of rows."""
        return tuple(self._curve(segment) for segment in range(len(self._chain.decoders)))

    @property
    def token(self) -> Curve:
        """The time of a token after the first few, by the number of rows of the prefill before it."""
        return fit_measured([(count, median(self.late(count))) for count in self.tokens])

    def late(self, count: int) -> list[float]:
        """Return the mean milliseconds of the later tokens, after each prefill of `count` rows."""
        return [_late(run) for run in self.tokens[count]]

    @property
    def token_start(self) -> tuple[float, ...]:
        """The times of the first few tokens, as `Costs.token_start`."""
        runs = [run for runs in self.tokens.values() for run in runs]
        return tuple(median(run[number] / _late(run) for run in runs) for number in range(_START))

    @property
    def pass_row(self) -> float:
        """The milliseconds of a further row of a pass, as `Costs.pass_row`."""
        return max(0.0, median(self._rows_of_passes))

    def _curve(self, segment: int) -> Curve:
        return fit_measured([(count, median(run[segment] for run in runs)) for count, runs in self.prefills.items()])

    def _run(self, count: int, *, counted: bool) -> None:
        chain, backend = self._chain, self._chain.backend
        cos, sin = (backend.tensor(table) for table in chain.rotary.tables(np.arange(count)))
        hidden, added = backend.tensor(self._rows[None, :count]), chain.deepstack_zeros(count)
        caches, spans = [], []
        for decoder in chain.decoders:
            cache, start = decoder.new_cache(), backend.mark()
            hidden = decoder({"hidden": hidden, "cos": cos, "sin": sin, **added}, cache)["hidden_out"]
            # Only the first segment takes these.
            added = {}
            spans.append((start, backend.mark()))
            caches.append(cache)
        backend.numpy(chain.last({"hidden": hidden})["logits"])
        written, tokens = KVCache(caches, [count] * len(caches)), []
        for _ in range(_TOKENS):
            began = time.perf_counter()
            backend.numpy(decode_one_token(chain, written, self._rows[0]))
            tokens.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        for _ in logits_of_rows(chain, written, np.resize(self._rows, (_PASS, self._rows.shape[1]))):
            pass
        passed = (time.perf_counter() - began) * 1e3
        if counted:
            self._rows_of_passes.append((passed - _late(tokens)) / (_PASS - 1))
            self.prefills[count].append(tuple(backend.elapsed_ms(*span) for span in spans))
            self.tokens[count].append(tokens)


def _late(tokens: Sequence[float]) -> float:
    """Return the mean milliseconds of the tokens after the start."""
    return fmean(tokens[_START:])
