"""Dialect `opset23`: the native RMSNormalization, RotaryEmbedding and Attention operators of ONNX opset 23.

For ONNX Runtime, TensorRT 10.15 or later, and TensorRT-RTX.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

OPSET = 23
IR_VERSION = 11


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


def running_sum(op: Any, x: ir.Value) -> ir.Value:
    """The sum of each element of x [N] int64 and all before it."""
    return op.CumSum(x, 0)
