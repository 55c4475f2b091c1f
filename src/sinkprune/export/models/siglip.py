"""SigLIP's salience as a graph.

Its tower has no CLS token: salience is the attention that a patch receives from all patches, as in Qwen's towers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from sinkprune.contract.manifest import SiglipTower
from sinkprune.export.graph import FLOAT, WeightedGraph

if TYPE_CHECKING:
    from sinkprune.export.models.merging import Merging


def received_attention(
    graph: WeightedGraph, tower: SiglipTower, query: ir.Value, key: ir.Value, merging: Merging | None
) -> ir.Value:
    """Return [G,N] fp32: the softmax attention that each patch receives, mean over heads, sum over patches."""
    op, received = graph.op, None
    # One head at a time, because the matrix of all heads is [G,H,N,N].
    for head in range(tower.num_heads):
        q, k = (op.Cast(op.Slice(y, [head], [head + 1], [1]), to=FLOAT) for y in (query, key))
        scaled = op.Mul(q, (tower.hidden_size // tower.num_heads) ** -0.5)
        scores = op.MatMul(scaled, op.Transpose(k, perm=[0, 1, 3, 2]))
        weights = op.Softmax(merging.counted(scores) if merging else scores, axis=-1)
        weights = merging.of_every_place(weights) if merging else weights
        column = op.ReduceSum(weights, [1, 2], keepdims=0)
        received = column if received is None else op.Add(received, column)
    return op.Div(merging.of_a_place(received) if merging else received, float(tower.num_heads))
