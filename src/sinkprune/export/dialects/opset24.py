"""Dialect `opset24`: the native RMSNormalization, RotaryEmbedding, Attention and TensorScatter operators of ONNX.

For ONNX Runtime, OpenVINO, TensorRT 10.15 or later, and TensorRT-RTX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from sinkprune.contract.manifest import CacheForm
from sinkprune.export.dialects import HIDDEN, CachedAttention, LayerCache, size

if TYPE_CHECKING:
    from sinkprune.contract.precision import WeightForms
    from sinkprune.export.weights.quantised_weights import Quantisation

OPSET = 24
IR_VERSION = 12
CACHE: CacheForm = "in-place"


def rms_norm(op: Any, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
    return op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon)


def rotary(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    return op.RotaryEmbedding(x, cos, sin)


def attention(
    op: Any,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None = None,
    bias: ir.Value | None = None,
) -> ir.Value:
    """Return softmax(query key^T / sqrt(h)) value for [B,H,S,h] and [B,Hkv,T,h]; `mask` [S,T] is True for seen keys.

    There is a mask and one output, because TensorRT aligns `is_causal` to the upper left and rejects a second output.
    """
    return op.Attention(query, key, value, bias if mask is None else mask)


def cached_attention(
    op: Any, query: ir.Value, key: ir.Value, value: ir.Value, past: LayerCache, mask: ir.Value | None, *, causal: bool
) -> CachedAttention:
    """Return the attention of new rows to a cache and to themselves, and the cache with the new rows.

    If a library uses one buffer for the cache before and after, it writes the new rows only. Attention runs over all
    rows that the buffers have room for.

    The query is scaled beforehand. For a scale in the attention, onnxruntime would repack all keys of a head, which
    takes longer than the product with one row.
    """
    key, value = cached(op, key, value, past)
    if mask is None:
        mask = _mask(op, query, key, past.length, causal)
    scaled = op.Mul(query, size(query, 3) ** -0.5)
    return CachedAttention(op.Attention(scaled, key, value, mask, scale=1.0), key, value, mask)


def cached(op: Any, key: ir.Value, value: ir.Value, past: LayerCache) -> tuple[ir.Value, ir.Value]:
    return (
        op.TensorScatter(past.key, key, past.length, axis=2),
        op.TensorScatter(past.value, value, past.length, axis=2),
    )


def running_sum(op: Any, x: ir.Value) -> ir.Value:
    return op.CumSum(x, 0)


def check_forms(forms: WeightForms, repacked: Quantisation | None) -> None:
    """Raise nothing: some engines of this dialect take each form."""


def _mask(op: Any, query: ir.Value, key: ir.Value, length: ir.Value, causal: bool) -> ir.Value:
    """Return [S,C], added to scores: a new row sees the `length` rows of the cache, and new rows.

    With `causal` it sees new rows up to its own, and otherwise all.

    It holds floats. For a bool mask of several layers, TensorRT-RTX 1.7 makes several operators of one name and
    fails, and onnxruntime converts it in every layer.
    """
    new, keys = (op.Squeeze(op.Shape(tensor, start=2, end=3)) for tensor in (query, key))
    places = op.Range(0, new, 1)
    last = places if causal else op.Max(places, op.Sub(new, 1))
    last_seen = op.Unsqueeze(op.Add(last, length), [1])
    seen = op.LessOrEqual(op.Unsqueeze(op.Range(0, keys, 1), [0]), last_seen)
    return op.CastLike(op.Where(seen, 0.0, HIDDEN), query)
