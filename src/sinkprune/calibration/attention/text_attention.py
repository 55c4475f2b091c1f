"""The attention that text pays to visual tokens at one layer, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkprune.contract.precision import Array


@dataclass(frozen=True)
class TextAttention:
    """Of every head h and text row i the distribution a_hi over the visual rows, which adds up to 1.

    It is the softmax of the layer's scaled logits over visual keys only, which is the causal softmax over all keys
    with its visual part divided by that part's sum: text rows stand behind the last visual row and see all of them.
    """

    entropy: float
    """In nats: the mean over heads and text rows of the entropy of a_hi."""
    mean: Array
    """[V] fp64: the mean of a_hi over heads and text rows; it adds up to 1."""

    @property
    def entropy_of_mean(self) -> float:
        """In nats: the entropy of `mean`, which is `entropy` at least: heads and rows look at different places."""
        return _entropy(self.mean)

    @property
    def uniform(self) -> float:
        """In nats: ln V, the most that either entropy can be."""
        return float(np.log(len(self.mean)))


def text_attention(query: Array, key: Array, visual: Array, text: Array) -> TextAttention:
    """Of one layer's queries [1,H,S,h] and keys [1,Hkv,S,h], both behind RoPE, in fp64.

    `visual` [V] and `text` [L] are rows of them, V at least 1. Where L is 0 the last row asks, as in the text-guided
    stages (method.md section 2).
    """
    heads, rows, width = query.shape[1:]
    asking = text if len(text) else np.array([rows - 1])
    repeats = heads // key.shape[1]
    entropy, mean = 0.0, np.zeros(len(visual))
    # Head by head: no more than [L,V] is in memory.
    for head in range(heads):
        asked = query[0, head, asking].astype(np.float64)
        keys = key[0, head // repeats, visual].astype(np.float64)
        logits = asked @ keys.T * width**-0.5
        logits -= logits.max(axis=1, keepdims=True)
        weights = np.exp(logits)
        totals = weights.sum(axis=1, keepdims=True)
        weights /= totals
        # ln a = logit - ln total, also where a is 0 by rounding
        entropy += float((np.log(totals[:, 0]) - (weights * logits).sum(axis=1)).mean())
        mean += weights.mean(axis=0)
    return TextAttention(entropy / heads, mean / heads)


def _entropy(shares: Array) -> float:
    seen = shares[shares > 0]
    return float(-(seen * np.log(seen)).sum())
