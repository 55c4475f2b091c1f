"""Dialects, one module each: the same operations in the operators of an ONNX opset.

These operations are all that differs between dialects. All other operators of our graphs are in every opset.
"""

from __future__ import annotations

from typing import Any, Protocol

import onnx_ir as ir

from sinkprune.contract.manifest import CacheForm, DialectName
from sinkprune.export.dialects import opset20, opset24
from sinkprune.export.dialects.cached import CachedAttention, LayerCache


class Dialect(Protocol):
    """A module of this package. `op` is a graph's or function's operators, under construction."""

    OPSET: int
    IR_VERSION: int
    CACHE: CacheForm
    """What a decoder segment does with its caches."""

    def rms_norm(self, op: Any, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
        """Return x / rms(x) * weight over the last axis; fp32 up to the product with `weight`."""

    def rotary(self, op: Any, x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """Return the rotary embedding of x [1,H,S,h] by the tables [1,S,h/2], halves rotated (not interleaved)."""

    def attention(
        self, op: Any, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value | None = None
    ) -> ir.Value:
        """Return softmax(query key^T / sqrt(h)) value for [B,H,S,h] and [B,Hkv,T,h].

        `mask` [S,T] is True where a row sees a key. Every row sees at least one key.
        """

    def cached_attention(
        self,
        op: Any,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        past: LayerCache,
        mask: ir.Value | None,
        *,
        causal: bool,
    ) -> CachedAttention:
        """Return the attention of new rows, [1,H,S,h] and [1,Hkv,S,h], to the cache and to new rows.

        With `causal` a row sees new rows up to its own, and otherwise all. `mask` is that of the layer before, and
        None in a segment's first layer.
        """

    def cached(self, op: Any, key: ir.Value, value: ir.Value, past: LayerCache) -> tuple[ir.Value, ir.Value]:
        """Return the outputs `key_i` and `value_i` for new rows [1,Hkv,S,h], by the dialect's form of cache."""

    def running_sum(self, op: Any, x: ir.Value) -> ir.Value:
        """Return the sum of each element of x [N] int64 and all before it, int64, exact up to 2**24."""


DIALECTS: dict[DialectName, Dialect] = {"opset24": opset24, "opset20": opset20}
