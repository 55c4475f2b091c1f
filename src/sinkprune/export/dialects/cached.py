"""What dialects share: what they are given and give back where rows attend to those of a cache."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

HIDDEN = -32752.0
"""What is added to the score of a key that is not seen: half of fp16's lowest number, so that the sum is finite.

Of -inf a fused kernel could make NaN where it meets a block of hidden keys first.
"""


class Past(NamedTuple):
    """The cache of a layer before its new rows."""

    key: ir.Value
    """[1,Hkv,C,h]: the rotated keys of the rows so far; what lies behind them is finite, and seen by nobody."""
    value: ir.Value
    """[1,Hkv,C,h]: their values."""
    length: ir.Value
    """[1] int64: how many rows there are so far."""


class Attended(NamedTuple):
    """What became of a layer's new rows."""

    mixed: ir.Value
    """[1,H,S,h]: the values each row has gathered."""
    key: ir.Value
    """What the graph gives as `key_i`: by the dialect's form of cache all rows, or the new ones."""
    value: ir.Value
    """What it gives as `value_i`, likewise."""
    mask: ir.Value
    """What the layers behind it are given: all layers of a segment hide the same keys."""


def size(value: ir.Value, axis: int) -> int:
    """A dimension of `value` that is known when the graph is written."""
    found = value.shape[axis] if value.shape is not None else None
    if not isinstance(found, int):
        raise ValueError(f"dimension {axis} of '{value.name}' is {found}, expected a known one")
    return found
