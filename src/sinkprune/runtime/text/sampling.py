"""Sampling of the next token: greedy, or with temperature, top-p and a seed; and penalties of repeated tokens."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from sinkprune.contract.checks import RealNumber, WholeNumber
from sinkprune.contract.errors import NumericsError
from sinkprune.contract.precision import Array

TEMPERATURE = RealNumber("temperature", 0.0, sys.float_info.max, "0 (greedy) or a larger finite number")
TOP_P = RealNumber("top_p", math.nextafter(0.0, 1.0), 1.0, "more than 0 and at most 1")
REPETITION_PENALTY = RealNumber("repetition_penalty", 0.01, 100.0)
PRESENCE_PENALTY = RealNumber("presence_penalty", -2.0, 2.0)
FREQUENCY_PENALTY = RealNumber("frequency_penalty", -2.0, 2.0)
PENALTIES = ((REPETITION_PENALTY, 1.0), (PRESENCE_PENALTY, 0.0), (FREQUENCY_PENALTY, 0.0))
"""The options for `Penalties`, and the value of each that changes nothing."""
# numpy's generator keeps 128 bits of a seed.
SEED = WholeNumber("seed", 0, 2**128 - 1)


class Penalties:
    """Lowers the logits of tokens that the prompt or the answer already has.

    `repetition` is transformers', for tokens of both: it divides positive logits, and multiplies others. `presence`
    and `frequency` are OpenAI's, for tokens of the answer: subtracted once, and once for each time.
    """

    def __init__(self, repetition: float, presence: float, frequency: float, prompt: Iterable[int]) -> None:
        """Start an answer to a `prompt` of these tokens."""
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


class Sampler:
    """Samples token ids. The same seed gives the same tokens."""

    def __init__(
        self,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        penalties: Penalties | None = None,
    ) -> None:
        """Sample greedily at `temperature` 0. Numbers are within `TEMPERATURE`, `TOP_P` and `SEED`."""
        self._temperature, self._top_p, self._seed, self._penalties = temperature, top_p, seed, penalties

    def __call__(self, logits: Array, allowed: Array | None = None) -> int:
        """Return a token id for logits [vocab], ties to the lower id; raises `NumericsError` if any is not finite.

        Only tokens where the booleans `allowed` [vocab] are true are sampled; at least one must be. None allows all.
        """
        check_finite(logits)
        if self._penalties is not None:
            logits = self._penalties(logits)
        token = self._sampled(logits if allowed is None else np.where(allowed, logits, -np.inf))
        if self._penalties is not None:
            self._penalties.add(token)
        return token

    @cached_property
    def _generator(self) -> np.random.Generator:
        # A greedy answer needs none.
        return np.random.default_rng(self._seed)

    def _sampled(self, logits: Array) -> int:
        if self._temperature == 0.0:
            return int(np.argmax(logits))
        below_best = logits.astype(np.float64) - logits.max()
        # At the lowest temperatures all but the best become exp(-inf) = 0.
        with np.errstate(over="ignore"):
            probabilities = np.exp(below_best / self._temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        # The smallest set whose probability reaches top_p; never empty.
        before = np.cumsum(probabilities[order]) - probabilities[order]
        nucleus = order[before < self._top_p]
        weights = probabilities[nucleus] / probabilities[nucleus].sum()
        return int(self._generator.choice(nucleus, p=weights))


def check_finite(logits: Array) -> None:
    """Raise `NumericsError` if any of the logits is not finite."""
    if not np.isfinite(logits).all():
        raise NumericsError(
            "the model's logits are not finite. If the bundle is fp16, its values may exceed that type; "
            "export it with --precision fp32. openvino-gpu computes in fp16 unless --compute is fp32."
        )
