"""Dialects, one module each: the same operations in the operators of an ONNX opset.

These operations are all that differs between dialects. All other operators of our graphs are in every opset. A module
is imported when a bundle has its dialect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, get_args

import onnx_ir as ir

from sinkprune.contract.manifest import CacheForm, DialectName

if TYPE_CHECKING:
    from sinkprune.contract.precision import WeightForms
    from sinkprune.export.weights.quantised_weights import Quantisation

DIALECTS: tuple[DialectName, ...] = get_args(DialectName)
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
        self,
        op: Any,
        query: ir.Value,
        key: ir.Value,
        value: ir.Value,
        mask: ir.Value | None = None,
        bias: ir.Value | None = None,
    ) -> ir.Value:
        """Return softmax(query key^T / sqrt(h)) value for [B,H,S,h] and [B,Hkv,T,h].

        `mask` [S,T] is True where a row sees a key. Every row sees at least one key. Without a mask, `bias`
        [B,1,S,T] is added to the scores.
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

    def check_forms(self, forms: WeightForms, repacked: Quantisation | None) -> None:
        """Raise `UsageError` for weights that the dialect's engines do not take.

        `repacked` is the quantisation of matrices whose codes are kept, or None.
        """

    def running_sum(self, op: Any, x: ir.Value) -> ir.Value:
        """Return the sum of each element of x [N] int64 and all before it, int64, exact up to 2**24."""


def load_dialect(name: DialectName) -> Dialect:
    """Return the dialect `name`."""
    return cast(Dialect, import_module(f"{__name__}.{name}"))
