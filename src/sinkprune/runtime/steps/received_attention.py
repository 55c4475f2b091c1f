"""The attention that rows receive, computed on the host, as the selects' graphs compute it."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.precision import Array


def received_attention(query: Array, key: Array, rows: Array) -> Array:
    """Return [T]: the causal attention that keys [Hkv,T,h] receive from the queries [H,R,h] of the rows `rows` [R].

    A softmax over visible keys, then the mean over heads and rows.
    """
    return received_by_head(query, key, rows).mean(axis=0)


def received_by_head(query: Array, key: Array, rows: Array) -> Array:
    """Return [H,T]: the same, with the mean over rows only."""
    heads, _, size = query.shape
    received = np.zeros((heads, key.shape[1]))
    hidden = np.arange(key.shape[1]) > rows[:, None]
    for head in range(heads):
        logits = query[head] @ key[head * len(key) // heads].T / np.sqrt(size)
        logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        received[head] = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    return received
