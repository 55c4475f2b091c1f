"""Vision transformers of CLIP and SigLIP as graphs.

The blocks after the feature layer are left out. Salience is one row of attention, the CLS query against all keys,
never the full matrix.

It has no CLS token: salience is the attention that a patch receives from all patches, as in Qwen's towers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import onnx_ir as ir

from sinkprune.contract.budgets import BARLESS_TOWER, MERGING_TOWER
from sinkprune.contract.manifest import SiglipTower, SquareTower, ViTTower
from sinkprune.contract.schedule import merges_of
from sinkprune.export.graph import Dim, WeightedGraph
from sinkprune.export.models.merging import Merging
from sinkprune.export.pruning.functions import gathered

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64
Merges = Mapping[int, int]
"""How many tokens each block of a tower merges (0-based)."""
NO_MERGES: Merges = MappingProxyType({})


def build_vision(graph: WeightedGraph, vit: ViTTower, merges: Merges = NO_MERGES, *, bars: bool = False) -> None:
    """Write `vision` of the graph contract: pixel values to patch tokens, their norms and their salience.

    With `bars`, only the patches of the input `places` [G,N] become tokens.
    """
    op, d, merging = graph.op, vit.hidden_size, Merging(graph, vit.tokens, special=1)
    pixels = graph.input("pixel_values", ["G", 3, vit.image_size, vit.image_size])
    x = _embed(graph, vit, pixels)
    if bars:
        x = op.Concat(op.Slice(x, [0], [1], [1]), _at_places(graph, op.Slice(x, [1], [vit.tokens + 1], [1])), axis=1)
    query = key = None
    for block in range(vit.num_blocks):
        name, count = f"vision_tower.encoder.layers.{block}", merges.get(block, 0)
        x, query, key = build_block(graph, vit, name, x, merging, count)
    n: Dim = "N" if bars else merging.left
    tokens = op.Slice(x, [1], [merging.left + 1], [1])
    norms = op.ReduceL2(op.Cast(tokens, to=_FLOAT), [-1], keepdims=0)
    graph.output("tokens", tokens, ["G", n, d])
    graph.output("norms", norms, ["G", n], _FLOAT)
    graph.output("salience", _cls_salience(graph, vit, query, key, merging), ["G", n], _FLOAT)
    if merges:
        merging.output()


def _embed(graph: WeightedGraph, vit: ViTTower, pixels: ir.Value) -> ir.Value:
    """Return [G,1+N,D]: the class embedding and the patches, with positions, normed."""
    op, d, p, name = graph.op, vit.hidden_size, vit.patch_size, "vision_tower.embeddings"
    kernel = graph.parameter(f"{name}.patch_embedding.weight", [d, 3, p, p])
    patches = op.Conv(pixels, kernel, kernel_shape=[p, p], strides=[p, p])
    patches = op.Transpose(op.Reshape(patches, [0, d, vit.tokens]), perm=[0, 2, 1])
    cls = op.Reshape(graph.parameter(f"{name}.class_embedding", [d]), [1, 1, d])
    cls = op.Expand(cls, op.Concat(op.Shape(pixels, start=0, end=1), [1, d], axis=0))
    positions = graph.parameter(f"{name}.position_embedding.weight", [vit.tokens + 1, d])
    x = op.Add(op.Concat(cls, patches, axis=1), positions)
    return layer_norm(graph, x, "vision_tower.pre_layrnorm", d, vit.layer_norm_eps)


def other_towers(
    tower: SquareTower, build: Callable[..., None], *, padded: bool
) -> dict[str, Callable[[WeightedGraph], None]]:
    """Return what writes the `tower` that `build` writes in its other forms, by graph.

    A tower with too few blocks merges nothing. Only `padded` pictures have bars.
    """
    merges, forms = merges_of(tower), dict[str, Callable[[WeightedGraph], None]]()
    if merges:
        forms[MERGING_TOWER] = partial(build, merges=merges)
    if padded:
        forms[BARLESS_TOWER] = partial(build, bars=True)
    return forms


def _at_places(graph: WeightedGraph, x: ir.Value) -> ir.Value:
    """Return the patches of `x` [G,patches,D] that the input `places` [G,N] names."""
    return gathered(graph.op, x, graph.input("places", ["G", "N"], _INT64))


def build_block(
    graph: WeightedGraph, vit: SquareTower, name: str, x: ir.Value, merging: Merging, merged: int
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the output [G,T,D] of an encoder block on `x`, and the queries and keys [G,H,T,h] of its attention.

    After its attention it merges `merged` tokens.
    """
    op, d, count = graph.op, vit.hidden_size, vit.num_heads

    def heads(y: ir.Value, which: str) -> ir.Value:
        y = graph.linear(y, f"{name}.self_attn.{which}", d, d, bias=True)
        return op.Transpose(op.Reshape(y, [0, 0, count, d // count]), perm=[0, 2, 1, 3])

    y = layer_norm(graph, x, f"{name}.layer_norm1", d, vit.layer_norm_eps)
    query, key, value = heads(y, "q_proj"), heads(y, "k_proj"), heads(y, "v_proj")
    mixed = graph.dialect.attention(op, query, key, value, bias=merging.bias)
    mixed = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, d])
    x = op.Add(x, graph.linear(mixed, f"{name}.self_attn.out_proj", d, d, bias=True))
    if merged:
        x = merging.merge(x, key, merged)

    y = layer_norm(graph, x, f"{name}.layer_norm2", d, vit.layer_norm_eps)
    layers, widths = [f"{name}.mlp.fc1", f"{name}.mlp.fc2"], [d, vit.intermediate_size, d]
    return op.Add(x, two_layers(graph, y, layers, widths, vit.activation)), query, key


ACTIVATIONS = ("quick_gelu", "gelu", "gelu_pytorch_tanh")
"""The activations of towers and LLaVA projectors, by their names in configurations."""


def layer_norm(graph: WeightedGraph, x: ir.Value, name: str, size: int, epsilon: float) -> ir.Value:
    """Return the LayerNorm of the rows `x` [...,`size`], with the weights `name`."""
    weight, bias = graph.parameter(f"{name}.weight", [size]), graph.parameter(f"{name}.bias", [size])
    return graph.op.LayerNormalization(x, weight, bias, axis=-1, epsilon=epsilon)


def two_layers(
    graph: WeightedGraph, x: ir.Value, names: Sequence[str], widths: Sequence[int], act: str, *, bias: bool = True
) -> ir.Value:
    """Return the second layer of `names` after the activation `act` of the first, on the rows `x`.

    `widths` are those of `x`, of the rows between the layers, and of the result.
    """
    op, (width, inner, outer) = graph.op, widths
    x = graph.linear(x, names[0], width, inner, bias=bias)
    if act == "quick_gelu":
        x = op.Mul(x, op.Sigmoid(op.Mul(x, 1.702)))
    else:
        x = op.Gelu(x, approximate="tanh") if act == "gelu_pytorch_tanh" else op.Gelu(x)
    return graph.linear(x, names[1], inner, outer, bias=bias)


def _cls_salience(
    graph: WeightedGraph, vit: ViTTower, query: ir.Value | None, key: ir.Value | None, merging: Merging
) -> ir.Value:
    """Return [G,N] fp32: the CLS row of softmax attention, its patch columns, mean over heads."""
    op = graph.op
    cls = op.Cast(op.Slice(query, [0], [1], [2]), to=_FLOAT)
    cls = op.Mul(cls, (vit.hidden_size // vit.num_heads) ** -0.5)
    scores = op.MatMul(cls, op.Transpose(op.Cast(key, to=_FLOAT), perm=[0, 1, 3, 2]))
    row = op.ReduceMean(op.Softmax(merging.counted(scores), axis=-1), [1, 2], keepdims=0)
    return op.Slice(merging.of_a_place(row), [1], [merging.left + 1], [1])


def build_siglip(
    graph: WeightedGraph, tower: SiglipTower, merges: Merges = NO_MERGES, *, bars: bool = False, normed: bool = True
) -> None:
    """Write `vision` of the graph contract: pixel values to patch tokens, their norms and their salience.

    Norms are measured before the tower's last norm layer, which erases them. With `normed` tokens are its output.
    With `bars`, only the patches of the input `places` [G,N] become tokens.
    """
    op, d, merging = graph.op, tower.hidden_size, Merging(graph, tower.tokens, special=0)
    pixels = graph.input("pixel_values", ["G", 3, tower.image_size, tower.image_size])
    x = _embed_siglip(graph, tower, pixels)
    if bars:
        x = _at_places(graph, x)
    attending = []
    for block in range(tower.num_blocks):
        name, count = f"vision_tower.encoder.layers.{block}", merges.get(block, 0)
        x, query, key = build_block(graph, tower, name, x, merging, count)
        attending.append((query, key))
    n: Dim = "N" if bars else merging.left
    norms = op.ReduceL2(op.Cast(x, to=_FLOAT), [-1], keepdims=0)
    if normed:
        x = layer_norm(graph, x, "vision_tower.post_layernorm", d, tower.layer_norm_eps)
    graph.output("tokens", x, ["G", n, d])
    graph.output("norms", norms, ["G", n], _FLOAT)
    patches = op.Cast(op.Shape(x, start=1, end=2), to=_FLOAT) if bars else float(tower.tokens)
    received = _received(graph, tower, *attending[tower.salience_block], merging)
    graph.output("salience", op.Div(received, patches), ["G", n], _FLOAT)
    if merges:
        merging.output()


def _embed_siglip(graph: WeightedGraph, tower: SiglipTower, pixels: ir.Value) -> ir.Value:
    """Return [G,N,D]: the patches, with positions."""
    op, d, p, name = graph.op, tower.hidden_size, tower.patch_size, "vision_tower.embeddings"
    kernel = graph.parameter(f"{name}.patch_embedding.weight", [d, 3, p, p])
    bias = graph.parameter(f"{name}.patch_embedding.bias", [d])
    patches = op.Conv(pixels, kernel, bias, kernel_shape=[p, p], strides=[p, p])
    patches = op.Transpose(op.Reshape(patches, [0, d, tower.tokens]), perm=[0, 2, 1])
    return op.Add(patches, graph.parameter(f"{name}.position_embedding.weight", [tower.tokens, d]))


def _received(graph: WeightedGraph, tower: SiglipTower, query: ir.Value, key: ir.Value, merging: Merging) -> ir.Value:
    """Return [G,N] fp32: the softmax attention that each patch receives, mean over heads, sum over patches."""
    op, received = graph.op, None
    # One head at a time, because the matrix of all heads is [G,H,N,N].
    for head in range(tower.num_heads):
        q, k = (op.Cast(op.Slice(y, [head], [head + 1], [1]), to=_FLOAT) for y in (query, key))
        scaled = op.Mul(q, (tower.hidden_size // tower.num_heads) ** -0.5)
        scores = op.MatMul(scaled, op.Transpose(k, perm=[0, 1, 3, 2]))
        weights = merging.of_every_place(op.Softmax(merging.counted(scores), axis=-1))
        column = op.ReduceSum(weights, [1, 2], keepdims=0)
        received = column if received is None else op.Add(received, column)
    return op.Div(merging.of_a_place(received), float(tower.num_heads))
