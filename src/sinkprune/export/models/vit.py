"""Vision transformers of CLIP, SigLIP and InternVL as graphs.

The blocks after the feature layer are left out. Salience is one row of attention, the CLS query against all keys,
never the full matrix.

SigLIP has no CLS token: salience is the attention that a patch receives from all patches, as in Qwen's towers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import onnx_ir as ir

from sinkprune.contract.budgets import BARLESS_TOWER, MERGING_TOWER
from sinkprune.contract.manifest import InternVLTower, SiglipTower, SquareTower, ViTTower
from sinkprune.contract.schedule import merges_of
from sinkprune.export.graph import Dim, WeightedGraph
from sinkprune.export.models.merging import Merging
from sinkprune.export.pruning.functions import gathered

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64
Merges = Mapping[int, int]
"""How many tokens each block of a tower merges (0-based)."""
NO_MERGES: Merges = MappingProxyType({})
# That of InternVL's norms of queries and keys, which no configuration has.
_ROW_EPSILON = 1e-6


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
    graph.output("salience", cls_salience(graph, vit, query, key, merging), ["G", n], _FLOAT)
    if merges:
        merging.output()


def _embed(graph: WeightedGraph, vit: ViTTower, pixels: ir.Value) -> ir.Value:
    """Return [G,1+N,D]: the class embedding and the patches, with positions, normed."""
    op, d, name = graph.op, vit.hidden_size, "vision_tower.embeddings"
    patches = patch_rows(graph, vit, pixels, f"{name}.patch_embedding", bias=False)
    cls = op.Reshape(graph.parameter(f"{name}.class_embedding", [d]), [1, 1, d])
    positions = graph.parameter(f"{name}.position_embedding.weight", [vit.tokens + 1, d])
    x = op.Add(_after_cls(graph, pixels, patches, cls), positions)
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


def patch_rows(graph: WeightedGraph, tower: SquareTower, pixels: ir.Value, name: str, *, bias: bool) -> ir.Value:
    """Return [G,patches,D]: the patches, embedded by the weights `name`."""
    op, d, p = graph.op, tower.hidden_size, tower.patch_size
    weights = [graph.parameter(f"{name}.weight", [d, 3, p, p])]
    weights += [graph.parameter(f"{name}.bias", [d])] if bias else []
    patches = op.Conv(pixels, *weights, kernel_shape=[p, p], strides=[p, p])
    return op.Transpose(op.Reshape(patches, [0, d, tower.patches]), perm=[0, 2, 1])


def _after_cls(graph: WeightedGraph, pixels: ir.Value, patches: ir.Value, cls: ir.Value) -> ir.Value:
    """Return [G,1+patches,D]: the embedding `cls` [1,1,D], then the `patches` of each of the G `pixels`."""
    op, end = graph.op, graph.op.Shape(cls, start=1, end=3)
    return op.Concat(op.Expand(cls, op.Concat(op.Shape(pixels, start=0, end=1), end, axis=0)), patches, axis=1)


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


def cls_salience(
    graph: WeightedGraph,
    vit: SquareTower,
    query: ir.Value | None,
    key: ir.Value | None,
    merging: Merging,
    patches: int = 1,
) -> ir.Value:
    """Return [G,N] fp32: the CLS row of softmax attention, its columns from `patches` on, mean over heads."""
    op = graph.op
    cls = op.Cast(op.Slice(query, [0], [1], [2]), to=_FLOAT)
    cls = op.Mul(cls, (vit.hidden_size // vit.num_heads) ** -0.5)
    scores = op.MatMul(cls, op.Transpose(op.Cast(key, to=_FLOAT), perm=[0, 1, 3, 2]))
    row = op.ReduceMean(op.Softmax(merging.counted(scores), axis=-1), [1, 2], keepdims=0)
    return op.Slice(merging.of_a_place(row), [patches], [patches + merging.left], [1])


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
    name, shape = "vision_tower.embeddings", [tower.tokens, tower.hidden_size]
    patches = patch_rows(graph, tower, pixels, f"{name}.patch_embedding", bias=True)
    return graph.op.Add(patches, graph.parameter(f"{name}.position_embedding.weight", shape))


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


@dataclass(frozen=True)
class InternViT:
    """InternVL's tower: the manifest's facts, and what else its graph needs."""

    facts: InternVLTower
    qkv_bias: bool
    row_norms: bool
    """Whether queries and keys are normed, all heads together."""
    rms: bool
    """Whether the norms of blocks are RMSNorm, and not LayerNorm."""
    last_norm: bool
    """Whether the rows after the last block are normed."""

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """Return the norm of the rows `x` [...,D] in a block, with the weights `name`."""
        size, epsilon = self.facts.hidden_size, self.facts.layer_norm_eps
        if not self.rms:
            return layer_norm(graph, x, name, size, epsilon)
        return graph.dialect.rms_norm(graph.op, x, graph.parameter(f"{name}.weight", [size]), epsilon)


def build_intern_vit(graph: WeightedGraph, vit: InternViT) -> None:
    """Write `vision` of the graph contract: pixel values to tokens, each of `merge_size`**2 patches, joined.

    A token's norm is the largest of its patches, before the tower's last norm layer. Its salience is their mean.
    """
    op, facts, d = graph.op, vit.facts, vit.facts.hidden_size
    merge, side = facts.merge_size, facts.image_size // facts.patch_size
    pixels = graph.input("pixel_values", ["G", 3, facts.image_size, facts.image_size])
    name = "vision_tower.embeddings"
    patches = patch_rows(graph, facts, pixels, f"{name}.patch_embeddings.projection", bias=True)
    x = _after_cls(graph, pixels, patches, graph.parameter(f"{name}.cls_token", [1, 1, d]))
    x = op.Add(x, graph.parameter(f"{name}.position_embeddings", [1, facts.patches + 1, d]))
    for block in range(facts.num_blocks):
        x, query, key = _intern_block(graph, vit, f"vision_tower.encoder.layer.{block}", x)
    rows = op.Slice(x, [1], [facts.patches + 1], [1])
    norms = op.ReduceL2(op.Cast(rows, to=_FLOAT), [-1], keepdims=0)
    salience = cls_salience(graph, facts, query, key, Merging(graph, facts.patches, special=1))
    if vit.last_norm:
        rows = layer_norm(graph, rows, "vision_tower.layernorm", d, facts.layer_norm_eps)

    def joined(y: ir.Value, width: int) -> ir.Value:
        """Return [G,N,merge**2*width] of [G,patches,width], both in raster order."""
        y = op.Reshape(y, [0, side // merge, merge, side // merge, merge * width])
        return op.Reshape(op.Transpose(y, perm=[0, 1, 3, 2, 4]), [0, facts.tokens, merge**2 * width])

    graph.output("tokens", joined(rows, d), ["G", facts.tokens, merge**2 * d])
    graph.output("norms", op.ReduceMax(joined(norms, 1), [-1], keepdims=0), ["G", facts.tokens], _FLOAT)
    graph.output("salience", op.ReduceMean(joined(salience, 1), [-1], keepdims=0), ["G", facts.tokens], _FLOAT)


def _intern_block(
    graph: WeightedGraph, vit: InternViT, name: str, x: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the output [G,T,D] of a block on `x`, and the queries and keys [G,H,T,h] of its attention."""
    op, facts, d, own = graph.op, vit.facts, vit.facts.hidden_size, f"{name}.attention"

    def heads(which: str) -> ir.Value:
        projected = graph.linear(y, f"{own}.{which}_proj", d, d, bias=vit.qkv_bias)
        if vit.row_norms and which != "v":
            weight = graph.parameter(f"{own}.{which}_norm.weight", [d])
            projected = graph.dialect.rms_norm(op, projected, weight, _ROW_EPSILON)
        split = op.Reshape(projected, [0, 0, facts.num_heads, d // facts.num_heads])
        return op.Transpose(split, perm=[0, 2, 1, 3])

    def scaled(part: ir.Value, which: int) -> ir.Value:
        return op.Mul(part, graph.parameter(f"{name}.lambda_{which}", [d]))

    y = vit.norm(graph, x, f"{name}.layernorm_before")
    query, key, value = map(heads, "qkv")
    mixed = graph.dialect.attention(op, query, key, value)
    mixed = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, d])
    x = op.Add(x, scaled(graph.linear(mixed, f"{own}.projection_layer", d, d, bias=True), 1))
    layers, widths = [f"{name}.mlp.fc1", f"{name}.mlp.fc2"], [d, facts.intermediate_size, d]
    y = two_layers(graph, vit.norm(graph, x, f"{name}.layernorm_after"), layers, widths, facts.activation)
    return op.Add(x, scaled(y, 2)), query, key
