"""Penalties for tokens that a prompt or an answer already has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from sinkprune.contract.precision import Array


class Penalties:
    """Lowers the logits of tokens that the prompt or the answer already has.

    `repetition` is transformers', for tokens of both: it divides positive logits, and multiplies others. `presence`
    and `frequency` are OpenAI's, for tokens of the answer: subtracted once, and once for each time.
    """

    def __init__(self, repetition: float, presence: float, frequency: float, prompt: Iterable[int]) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._prompt, self._answer = np.fromiter(prompt, np.int64), Counter[int]()

    def __call__(self, logits: Array) -> Array:
        """Return the logits [vocab] of the next token with the penalties, in fp32."""
        logits = logits.astype(np.float32)
        written, counts = (np.array([*each], np.int64) for each in (self._answer.keys(), self._answer.values()))
        # Twice the same token is written twice with the same value.
        seen = np.concatenate([self._prompt[self._prompt < logits.size], written])
        found = logits[seen]
        logits[seen] = np.where(found < 0, found * self._repetition, found / self._repetition)
        logits[written] -= self._frequency * counts + self._presence
        return logits

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
        self._answer[token] += 1
