"""Dialect `opset20`: opset 20 without the operators TensorRT 10.3 (JetPack 6) lacks. Same numbers as `opset24`.

The parser of 10.3 is built with ONNX 1.16, which ends at IR version 10. A test checks every graph against the list of
operators that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import CacheForm
from sinkprune.export.dialects import HIDDEN, CachedAttention, LayerCache, size

if TYPE_CHECKING:
    from sinkprune.contract.precision import WeightForms
    from sinkprune.export.weights.quantised_weights import Quantisation

OPSET = 20
IR_VERSION = 10
CACHE: CacheForm = "rows"

_FLOAT = ir.DataType.FLOAT
# The number of elements of a running sum that are added at once.
_LINE = 128


def rms_norm(op: Any, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
    wide = op.Cast(x, to=_FLOAT)
    mean_square = op.ReduceMean(op.Mul(wide, wide), [-1], keepdims=1)
    normed = op.Div(wide, op.Sqrt(op.Add(mean_square, epsilon)))
    return op.Mul(op.CastLike(normed, x), weight)


def rotary(op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    cos, sin = op.Unsqueeze(cos, [1]), op.Unsqueeze(sin, [1])
    first, second = op.Split(x, axis=-1, num_outputs=2, _outputs=2)
    turned_first = op.Sub(op.Mul(first, cos), op.Mul(second, sin))
    turned_second = op.Add(op.Mul(second, cos), op.Mul(first, sin))
    return op.Concat(turned_first, turned_second, axis=-1)


def attention(
    op: Any,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None = None,
    bias: ir.Value | None = None,
) -> ir.Value:
    """Return softmax(query key^T / sqrt(h)) value for [B,H,S,h] and [B,Hkv,T,h]; `mask` [S,T] is True for seen keys.

    TensorRT fuses attention of this shape to a kernel that keeps the scores on the chip: the query is scaled before
    the first product, the mask is added, and only the softmax stands between the products, all in the type of the
    states ("Fused Attention" and "MHA fusion" in NVIDIA's TensorRT documentation; heads of 16 to 256 in steps of 8).
    """
    heads, kv_heads, head_dim = size(query, 1), size(key, 1), size(query, 3)
    if kv_heads != heads:
        key, value = (_repeated(op, x, heads, kv_heads, head_dim) for x in (key, value))
    scores = op.MatMul(op.Mul(query, head_dim**-0.5), op.Transpose(key, perm=[0, 1, 3, 2]))
    if mask is not None:
        bias = op.CastLike(op.Where(mask, 0.0, HIDDEN), query)
    if bias is not None:
        scores = op.Add(scores, bias)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def cached_attention(
    op: Any, query: ir.Value, key: ir.Value, value: ir.Value, past: LayerCache, mask: ir.Value | None, *, causal: bool
) -> CachedAttention:
    if mask is None:
        mask = _cache_mask(op, query, past, size(query, 1) // size(key, 1), causal)
    return attention_beside(op, query, key, value, past, mask)


def cached(op: Any, key: ir.Value, value: ir.Value, past: LayerCache) -> tuple[ir.Value, ir.Value]:
    # TensorRT would drop inputs that nothing reads: a cache, and the length where the segment has no other layer.
    first, second = (op.Slice(rows, [0], [0], [2]) for rows in (past.key, past.value))
    first = op.Mul(first, op.CastLike(past.length, first))
    return op.Concat(first, key, axis=2), op.Concat(second, value, axis=2)


def running_sum(op: Any, x: ir.Value) -> ir.Value:
    """Return the sum of each element of x [N] int64 and all before it, int64, exact up to 2**24.

    CumSum is no choice: 10.3 takes floats only, and its parser makes a loop that adds one element a turn. Sums are
    formed line by line, because a table of N x N would take a gigabyte for the rows of a long clip.
    """
    count = op.Shape(x)
    lines = op.Add(op.Div(count, [_LINE]), [1])
    filler = op.Expand(0.0, op.Sub(op.Mul(lines, [_LINE]), count))
    table = op.Reshape(op.Concat(op.Cast(x, to=_FLOAT), filler, axis=0), [-1, _LINE])
    totals = op.ReduceSum(table, [1], keepdims=0)
    before = op.Sub(_running_sums(op, totals), totals)
    sums = op.Reshape(op.Add(_running_sums(op, table), op.Unsqueeze(before, [1])), [-1])
    return op.Cast(op.Slice(sums, [0], count, [0]), to=ir.DataType.INT64)


def check_forms(forms: WeightForms, repacked: Quantisation | None) -> None:
    """Reject weights that TensorRT 10.3 does not take; raises `UsageError`."""
    for option, form in (("--weights", forms.decoder), ("--vision-weights", forms.vision)):
        if form == "uint4":
            raise UsageError(
                f"weights are uint4, and TensorRT takes no zero points. Export with {option} int4, which rounds them "
                "again and reports the error, or for other engines with --dialect opset24."
            )
    if repacked and repacked.form == "int8" and repacked.group_size is not None:
        raise UsageError(
            "the checkpoint's int8 has a scale for each group of inputs; opset20 is for TensorRT 10.3, which takes "
            "one an output. Export with --weights int8, which rounds again and reports the error."
        )


def _cache_mask(op: Any, query: ir.Value, past: LayerCache, group: int, causal: bool) -> ir.Value:
    """Return [group*S, C+S], added to scores: every row sees the cache's rows, and new rows.

    With `causal` it sees new rows up to its own, and otherwise all.
    """
    new, room = (op.Shape(tensor, start=2, end=3) for tensor in (query, past.key))
    places = op.Range(0, op.Squeeze(new), 1)
    last = places if causal else op.Max(places, op.Sub(new, 1))
    row = op.Reshape(op.Expand(op.Unsqueeze(last, [0]), op.Concat([group], new, axis=0)), [-1, 1])
    own = op.LessOrEqual(op.Unsqueeze(places, [0]), row)
    filled = op.Unsqueeze(op.Less(op.Range(0, op.Squeeze(room), 1), past.length), [0])
    filled = op.Expand(filled, op.Concat(op.Shape(row, start=0, end=1), room, axis=0))
    seen = op.Concat(filled, own, axis=1)
    return op.CastLike(op.Where(seen, 0.0, HIDDEN), query)


def _running_sums(op: Any, x: ir.Value) -> ir.Value:
    """Return the running sums of x [...,n] fp32 over its last axis, by a table [...,n,n]."""
    place = op.Range(0, op.Squeeze(op.Shape(x, start=-1)), 1)
    counted = op.LessOrEqual(op.Unsqueeze(place, [0]), op.Unsqueeze(place, [1]))
    return op.ReduceSum(op.Where(counted, op.Unsqueeze(x, [-2]), 0.0), [-1], keepdims=0)


def _repeated(op: Any, x: ir.Value, heads: int, kv_heads: int, head_dim: int) -> ir.Value:
    """Return [B,H,T,h] of [B,Hkv,T,h]: each head repeated for the queries of its group."""
    groups = op.Expand(op.Unsqueeze(x, [2]), [1, 1, heads // kv_heads, 1, 1])
    return op.Reshape(groups, [0, heads, -1, head_dim])


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
