"""Attention to a cache: the inputs and outputs that all dialects share."""

from __future__ import annotations

from typing import NamedTuple

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
