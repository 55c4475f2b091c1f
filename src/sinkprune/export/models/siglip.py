"""The SigLIP vision tower without its pooling head, with the norms and the salience that the sanitizer reads.

It has no CLS token: salience is the attention that a patch receives from all patches, as in Qwen's towers.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.towers import SiglipTower
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.vit import build_block, layer_norm

_FLOAT = ir.DataType.FLOAT


def build_vision(graph: WeightedGraph, tower: SiglipTower, *, normed: bool = True) -> None:
    """Write `vision` of the graph contract: pixel values to patch tokens, their norms and their salience.

    Norms are measured before the tower's last norm layer, which erases them. With `normed` tokens are its output.
    """
    op, n, d = graph.op, tower.tokens, tower.hidden_size
    pixels = graph.input("pixel_values", ["G", 3, tower.image_size, tower.image_size])
    x = _embed(graph, tower, pixels)
    attending = []
    for block in range(tower.num_blocks):
        x, query, key = build_block(graph, tower, f"vision_tower.encoder.layers.{block}", x)
        attending.append((query, key))
    norms = op.ReduceL2(op.Cast(x, to=_FLOAT), [-1], keepdims=0)
    if normed:
        x = layer_norm(graph, x, "vision_tower.post_layernorm", d, tower.layer_norm_eps)
    graph.output("tokens", x, ["G", n, d])
    graph.output("norms", norms, ["G", n], _FLOAT)
    graph.output("salience", _received(graph, tower, *attending[tower.salience_block]), ["G", n], _FLOAT)


def _embed(graph: WeightedGraph, tower: SiglipTower, pixels: ir.Value) -> ir.Value:
    """Return [G,N,D]: the patches, with positions."""
    op, d, p, name = graph.op, tower.hidden_size, tower.patch_size, "vision_tower.embeddings"
    kernel = graph.parameter(f"{name}.patch_embedding.weight", [d, 3, p, p])
    bias = graph.parameter(f"{name}.patch_embedding.bias", [d])
    patches = op.Conv(pixels, kernel, bias, kernel_shape=[p, p], strides=[p, p])
    patches = op.Transpose(op.Reshape(patches, [0, d, tower.tokens]), perm=[0, 2, 1])
    return op.Add(patches, graph.parameter(f"{name}.position_embedding.weight", [tower.tokens, d]))


def _received(graph: WeightedGraph, tower: SiglipTower, query: ir.Value, key: ir.Value) -> ir.Value:
    """Return [G,N] fp32: the softmax attention that each patch receives, mean over heads and querying patches."""
    op, received = graph.op, None
    # One head at a time, because the matrix of all heads is [G,H,N,N].
    for head in range(tower.num_heads):
        q, k = (op.Cast(op.Slice(y, [head], [head + 1], [1]), to=_FLOAT) for y in (query, key))
        scaled = op.Mul(q, (tower.hidden_size // tower.num_heads) ** -0.5)
        weights = op.Softmax(op.MatMul(scaled, op.Transpose(k, perm=[0, 1, 3, 2])), axis=-1)
        column = op.ReduceSum(weights, [1, 2], keepdims=0)
        received = column if received is None else op.Add(received, column)
    return op.Div(received, float(tower.num_heads * tower.tokens))
