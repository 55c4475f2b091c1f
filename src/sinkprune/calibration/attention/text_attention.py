"""The attention that text pays to visual tokens at one layer, and its entropy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkprune.contract.precision import Array


@dataclass(frozen=True)
class TextAttention:
    """The distributions a_hi over the visual rows, one of every head h and text row i; each adds up to 1.

    a_hi is the softmax of the layer's scaled logits over visual keys only. This equals the visual part of the causal
    softmax divided by its sum, because text rows come after the last visual row and attend to all visual rows.
    """

    entropy: float
    """In nats: the mean over heads and text rows of the entropy of a_hi."""
    mean: Array
    """[V] fp64: the mean of a_hi over heads and text rows; it adds up to 1."""

    @property
    def entropy_of_mean(self) -> float:
        """In nats: the entropy of `mean`, at least `entropy`, because heads and rows look at different places."""
        return _entropy(self.mean)

    @property
    def uniform(self) -> float:
        """In nats: ln V, the most that either entropy can be."""
        return float(np.log(len(self.mean)))


def text_attention(query: Array, key: Array, visual: Array, text: Array) -> TextAttention:
    """Compute in fp64 from one layer's queries [1,H,S,h] and keys [1,Hkv,S,h], both after RoPE.

    `visual` [V] and `text` [L] are rows of them, V at least 1. If L is 0, the last row stands for the text, as in the
    text-guided stages (method.md section 2).
    """
    heads, rows, width = query.shape[1:]
    text = text if len(text) else np.array([rows - 1])
    repeats = heads // key.shape[1]
    entropy, mean = 0.0, np.zeros(len(visual))
    # Head by head: no more than [L,V] is in memory.
    for head in range(heads):
        queries = query[0, head, text].astype(np.float64)
        keys = key[0, head // repeats, visual].astype(np.float64)
        logits = queries @ keys.T * width**-0.5
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
