"""How long the decoder takes for so many rows, segment by segment, and for a token behind them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import numpy as np

from sinkprune.contract.costs.model import Curve, fit_measured
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.embedding import Embedding

_TOKENS = 2


class DecoderTimes:
    """Milliseconds of the decoder on rows of text: what rows say does not matter to the time they take."""

    def __init__(self, chain: Chain, embedding: Embedding, counts: Sequence[int]) -> None:
        """Of prefills of each of `counts` rows."""
        self._chain, self._counts = chain, sorted(counts)
        rows = embedding(range(min(max(counts), chain.model.vocab_size)))
        self._rows: Array = np.resize(rows, (max(counts), rows.shape[1]))
        self.prefills: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        """By count: each prefill's way through each segment."""
        self.tokens: dict[int, list[float]] = defaultdict(list)
        """By count: each token behind such a prefill, head included."""

    def run(self, *, counted: bool) -> None:
        """A prefill of each count, and tokens behind it."""
        for count in self._counts:
            self._run(count, counted=counted)
        # Behind a larger, then behind a smaller: what was before is no count's privilege.
        self._counts.reverse()

    @property
    def segments(self) -> tuple[Curve, ...]:
        """A prefill's way through each segment, against its rows."""
        return tuple(self._curve(segment) for segment in range(len(self._chain.decoders)))

    @property
    def token(self) -> Curve:
        """A token behind a prefill, against the prefill's rows."""
        return fit_measured([(count, median(ms)) for count, ms in self.tokens.items()])

    def _curve(self, segment: int) -> Curve:
        return fit_measured([(count, median(run[segment] for run in runs)) for count, runs in self.prefills.items()])

    def _run(self, count: int, *, counted: bool) -> None:
        chain, backend = self._chain, self._chain.backend
        cos, sin = (backend.tensor(table) for table in chain.rotary.tables(np.arange(count)))
        hidden, added = backend.tensor(self._rows[None, :count]), chain.beside_text(count)
        caches, spans = [], []
        for decoder in chain.decoders:
            cache, start = decoder.new_cache(), backend.mark()
            hidden = decoder({"hidden": hidden, "cos": cos, "sin": sin, **added}, cache)["hidden_out"]
            # Of the first segment alone
            added = {}
            spans.append((start, backend.mark()))
            caches.append(cache)
        backend.numpy(chain.head({"hidden": hidden})["logits"])
        written, tokens = KVCache(caches, [count] * len(caches)), []
        for _ in range(_TOKENS):
            began = time.perf_counter()
            backend.numpy(decode_one_token(chain, written, self._rows[0]))
            tokens.append((time.perf_counter() - began) * 1e3)
        if counted:
            self.prefills[count].append(tuple(backend.elapsed_ms(*span) for span in spans))
            self.tokens[count] += tokens
