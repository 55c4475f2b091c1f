"""The attention that rows receive, computed on the host, as the selects' graphs compute it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.steps.prompt_rows import PromptRows


def received_attention(backend: Backend, outputs: Mapping[str, Tensor], rows: PromptRows) -> Array:
    """Return [V]: the causal attention that visual rows receive from the text, by a layer's `query` and `key`.

    A softmax over visible keys, then the mean over heads and text rows, in fp32. Without text after the last picture,
    the last row stands for it.
    """
    query, key = (backend.numpy(outputs[name]).astype(np.float32) for name in ("query", "key"))
    return received_by_head(query, key, rows).mean(axis=0)


def received_by_head(query: Array, key: Array, rows: PromptRows) -> Array:
    """Return [H,V]: the same of queries [1,H,S,h] and keys [1,Hkv,S,h], with the mean over text rows only."""
    text = rows.text if len(rows.text) else np.array([rows.length - 1])
    query, key = query[0][:, text], key[0]
    heads, _, size = query.shape
    received = np.zeros((heads, key.shape[1]))
    hidden = np.arange(key.shape[1]) > text[:, None]
    for head in range(heads):
        logits = query[head] @ key[head * len(key) // heads].T / np.sqrt(size)
        logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        received[head] = (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)
    return received[:, rows.visual]
