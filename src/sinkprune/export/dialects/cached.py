"""Attention to a cache: the inputs and outputs that all dialects share."""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

HIDDEN = -32752.0
"""Added to the score of a hidden key: half of fp16's lowest number, so that the sum is finite.

With -inf a fused kernel could compute NaN if its first block has hidden keys only.
"""


class LayerCache(NamedTuple):
    """The cache of a layer before its new rows."""

    key: ir.Value
    """[1,Hkv,C,h]: the rotated keys of the rows so far. Values after them are finite, and hidden."""
    value: ir.Value
    """[1,Hkv,C,h]: their values."""
    length: ir.Value
    """[1] int64: the number of rows so far."""


class CachedAttention(NamedTuple):
    """The attention of a layer's new rows, and its cache with them."""

    mixed: ir.Value
    """[1,H,S,h]: the attention of each row."""
    key: ir.Value
    """The graph's output `key_i`: all rows or the new ones, by the dialect's form of cache."""
    value: ir.Value
    """The graph's output `value_i`, likewise."""
    mask: ir.Value
    """The mask for the next layers: all layers of a segment hide the same keys."""


def size(value: ir.Value, axis: int) -> int:
    """Return a dimension of `value` that is known at export."""
    found = value.shape[axis] if value.shape is not None else None
    if not isinstance(found, int):
        raise ValueError(f"dimension {axis} of '{value.name}' is {found}, expected a known one")
    return found


def attention_beside(
    op: Any, query: ir.Value, key: ir.Value, value: ir.Value, past: LayerCache, mask: ir.Value
) -> CachedAttention:
    """Return the attention of new rows [1,H,S,h] to a cache and to new rows [1,Hkv,S,h], and the new rows.

    `mask` [H/Hkv*S,C+S] is added to scores. Cache and new rows have products of their own, so that only scores are
    joined and no cache is copied. Query heads that share keys are stacked, so that no head of a cache is repeated.
    """
    heads, kv_heads, head_dim = size(query, 1), size(key, 1), size(query, 3)
    rows = op.Reshape(op.Mul(query, head_dim**-0.5), [1, kv_heads, -1, head_dim])
    scores = [op.MatMul(rows, op.Transpose(keys, perm=[0, 1, 3, 2])) for keys in (past.key, key)]
    shares = op.Softmax(op.Add(op.Concat(*scores, axis=-1), mask), axis=-1)
    room = op.Shape(past.key, start=2, end=3)
    of_past = op.MatMul(op.Slice(shares, [0], room, [3]), past.value)
    of_new = op.MatMul(op.Slice(shares, room, [2**31 - 1], [3]), value)
    mixed = op.Reshape(op.Add(of_past, of_new), [1, heads, -1, head_dim])
    return CachedAttention(mixed, key, value, mask)
