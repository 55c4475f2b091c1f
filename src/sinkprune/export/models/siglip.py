"""SigLIP's vision transformer as a graph.

It has no CLS token: salience is the attention that a patch receives from all patches, as in Qwen's towers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from sinkprune.contract.manifest import SiglipTower
from sinkprune.export.graph import Dim, WeightedGraph
from sinkprune.export.models.vit import NO_MERGES, Merges, at_places, build_block, layer_norm, new_merging, patch_rows

if TYPE_CHECKING:
    from sinkprune.export.models.merging import Merging

_FLOAT = ir.DataType.FLOAT


def build_siglip(
    graph: WeightedGraph, tower: SiglipTower, merges: Merges = NO_MERGES, *, bars: bool = False, normed: bool = True
) -> None:
    """Write `vision` of the graph contract: pixel values to patch tokens, their norms and their salience.

    Norms are measured before the tower's last norm layer, which erases them. With `normed` tokens are its output.
    With `bars`, only the patches of the input `places` [G,N] become tokens.
    """
    op, d, merging = graph.op, tower.hidden_size, new_merging(graph, tower, merges, special=0)
    pixels = graph.input("pixel_values", ["G", 3, tower.image_size, tower.image_size])
    x = _embed_siglip(graph, tower, pixels)
    if bars:
        x = at_places(graph, x)
    attending = []
    for block in range(tower.num_blocks):
        name, count = f"vision_tower.encoder.layers.{block}", merges.get(block, 0)
        x, query, key = build_block(graph, tower, name, x, merging, count)
        attending.append((query, key))
    n: Dim = "N" if bars else merging.left if merging else tower.tokens
    norms = op.ReduceL2(op.Cast(x, to=_FLOAT), [-1], keepdims=0)
    if normed:
        x = layer_norm(graph, x, "vision_tower.post_layernorm", d, tower.layer_norm_eps)
    graph.output("tokens", x, ["G", n, d])
    graph.output("norms", norms, ["G", n], _FLOAT)
    patches = op.Cast(op.Shape(x, start=1, end=2), to=_FLOAT) if bars else float(tower.tokens)
    received = _received(graph, tower, *attending[tower.salience_block], merging)
    graph.output("salience", op.Div(received, patches), ["G", n], _FLOAT)
    if merging:
        merging.output()


def _embed_siglip(graph: WeightedGraph, tower: SiglipTower, pixels: ir.Value) -> ir.Value:
    """Return [G,N,D]: the patches, with positions."""
    name, shape = "vision_tower.embeddings", [tower.tokens, tower.hidden_size]
    patches = patch_rows(graph, tower, pixels, f"{name}.patch_embedding", bias=True)
    return graph.op.Add(patches, graph.parameter(f"{name}.position_embedding.weight", shape))


def _received(
    graph: WeightedGraph, tower: SiglipTower, query: ir.Value, key: ir.Value, merging: Merging | None
) -> ir.Value:
    """Return [G,N] fp32: the softmax attention that each patch receives, mean over heads, sum over patches."""
    op, received = graph.op, None
    # One head at a time, because the matrix of all heads is [G,H,N,N].
    for head in range(tower.num_heads):
        q, k = (op.Cast(op.Slice(y, [head], [head + 1], [1]), to=_FLOAT) for y in (query, key))
        scaled = op.Mul(q, (tower.hidden_size // tower.num_heads) ** -0.5)
        scores = op.MatMul(scaled, op.Transpose(k, perm=[0, 1, 3, 2]))
        weights = op.Softmax(merging.counted(scores) if merging else scores, axis=-1)
        weights = merging.of_every_place(weights) if merging else weights
        column = op.ReduceSum(weights, [1, 2], keepdims=0)
        received = column if received is None else op.Add(received, column)
    return op.Div(merging.of_a_place(received) if merging else received, float(tower.num_heads))
