"""Dialect `opset24`: the native RMSNormalization, RotaryEmbedding, Attention and TensorScatter operators of ONNX.

For ONNX Runtime, OpenVINO, TensorRT 10.15 or later, and TensorRT-RTX.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from sinkprune.contract.manifest import CacheForm
from sinkprune.export.dialects.cached import HIDDEN, Attended, Past, size

OPSET = 24
IR_VERSION = 12
CACHE: CacheForm = "in-place"


def rms_norm(op: Any, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
    """x / rms(x) * weight over the last axis, computed in fp32."""
    return op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon)


def rotary(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotary position embedding of x [1,H,S,h] by the tables [1,S,h/2], halves rotated (not interleaved)."""
    return op.RotaryEmbedding(x, cos, sin)


def attention(op: Any, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    """softmax(query key^T / sqrt(h)) value for [B,H,S,h] and [B,Hkv,T,h]; `mask` [S,T] is True where a key is seen.

    The mask is explicit and the output the only one: TensorRT reads `is_causal` as upper-left aligned and refuses
    a second output.
    """
    return op.Attention(query, key, value, mask)


def cached_attention(
    op: Any, query: ir.Value, key: ir.Value, value: ir.Value, past: Past, mask: ir.Value | None
) -> Attended:
    """Attention of new rows to themselves and to those of a cache, which they are written into.

    The caches that are given back are those of `past` with the new rows in them: a library that is given one buffer
    for both writes nothing else. Attention runs over all rows that the buffers have room for.

    The query is scaled before: onnxruntime packs all keys of a head anew for a product with a scale of its own, and
    of one row that takes longer than the product.
    """
    key, value = (
        op.TensorScatter(buffer, new, past.length, axis=2) for buffer, new in ((past.key, key), (past.value, value))
    )
    if mask is None:
        mask = _mask(op, query, key, past.length)
    scaled = op.Mul(query, size(query, 3) ** -0.5)
    return Attended(op.Attention(scaled, key, value, mask, scale=1.0), key, value, mask)


def running_sum(op: Any, x: ir.Value) -> ir.Value:
    """The sum of each element of x [N] int64 and all before it."""
    return op.CumSum(x, 0)


def _mask(op: Any, query: ir.Value, key: ir.Value, length: ir.Value) -> ir.Value:
    """[S,C], what is added to scores: new row r sees the `length` rows before it and those up to its own.

    Not of bool: of one that several layers share TensorRT-RTX 1.7 makes operators of one name, and gives up; and
    onnxruntime makes numbers of it in every layer anew.
    """
    new, keys = (op.Squeeze(op.Shape(tensor, start=2, end=3)) for tensor in (query, key))
    last_seen = op.Unsqueeze(op.Add(op.Range(0, new, 1), length), [1])
    seen = op.LessOrEqual(op.Unsqueeze(op.Range(0, keys, 1), [0]), last_seen)
    return op.CastLike(op.Where(seen, 0.0, HIDDEN), query)
