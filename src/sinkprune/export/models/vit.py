"""The vision transformers of CLIP and SigLIP as graphs, and what others share with them.

The blocks after the feature layer are left out. Salience is one row of attention, the CLS query against all keys,
never the full matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import onnx_ir as ir

from sinkprune.contract.budgets import BARLESS_TOWER, MERGING_TOWER
from sinkprune.contract.manifest import SiglipTower, SquareTower, ViTTower
from sinkprune.contract.schedule import merges_of
from sinkprune.export.graph import FLOAT, INT64, Dim, WeightedGraph
from sinkprune.export.pruning.functions import gathered

if TYPE_CHECKING:
    from sinkprune.export.models.merging import Merging

Merges = Mapping[int, int]
"""How many tokens each block of a tower merges (0-based)."""
NO_MERGES: Merges = MappingProxyType({})


def build_vision(
    graph: WeightedGraph,
    tower: ViTTower | SiglipTower,
    merges: Merges = NO_MERGES,
    *,
    bars: bool = False,
    normed: bool = False,
) -> None:
    """Write `vision` of the graph contract: pixel values to patch tokens, their norms and their salience.

    Norms are measured before the tower's last norm layer, which erases them. With `normed` tokens are its output.
    With `bars`, only the patches of the input `places` [G,N] become tokens.
    """
    op, d, first = graph.op, tower.hidden_size, 0 if isinstance(tower, SiglipTower) else 1
    merging = new_merging(graph, tower, merges, special=first)
    pixels = graph.input("pixel_values", ["G", 3, tower.image_size, tower.image_size])
    x = _embed(graph, tower, pixels)
    if bars and first:
        x = op.Concat(op.Slice(x, [0], [1], [1]), at_places(graph, op.Slice(x, [1], [tower.tokens + 1], [1])), axis=1)
    elif bars:
        x = at_places(graph, x)
    attending = []
    for block in range(tower.num_blocks):
        name, count = f"vision_tower.encoder.layers.{block}", merges.get(block, 0)
        x, query, key = build_block(graph, tower, name, x, merging, count)
        attending.append((query, key))
    left = merging.left if merging else tower.tokens
    n: Dim = "N" if bars else left
    tokens = op.Slice(x, [1], [left + 1], [1]) if first else x
    norms = op.ReduceL2(op.Cast(tokens, to=FLOAT), [-1], keepdims=0)
    if normed:
        tokens = layer_norm(graph, tokens, "vision_tower.post_layernorm", d, tower.layer_norm_eps)
    graph.output("tokens", tokens, ["G", n, d])
    graph.output("norms", norms, ["G", n], FLOAT)
    if isinstance(tower, SiglipTower):
        from sinkprune.export.models.siglip import received_attention

        patches = op.Cast(op.Shape(tokens, start=1, end=2), to=FLOAT) if bars else float(tower.tokens)
        salience = op.Div(received_attention(graph, tower, *attending[tower.salience_block], merging), patches)
    else:
        salience = cls_salience(graph, tower, query, key, [1, left + 1], merging)
    graph.output("salience", salience, ["G", n], FLOAT)
    if merging:
        merging.output()


def new_merging(graph: WeightedGraph, tower: SquareTower, merges: Merges, special: int) -> Merging | None:
    """Return the tokens of a `tower` after `special` rows, where blocks merge some of them; None where none does."""
    if not merges:
        return None
    from sinkprune.export.models.merging import Merging

    return Merging(graph, tower.tokens, special)


def _embed(graph: WeightedGraph, tower: SquareTower, pixels: ir.Value) -> ir.Value:
    """Return [G,N,D], the patches with positions, or [G,1+N,D] after CLIP's class embedding, normed."""
    op, d, name, siglip = graph.op, tower.hidden_size, "vision_tower.embeddings", isinstance(tower, SiglipTower)
    x = patch_rows(graph, tower, pixels, f"{name}.patch_embedding", bias=siglip)
    if not siglip:
        x = after_cls(graph, pixels, x, op.Reshape(graph.parameter(f"{name}.class_embedding", [d]), [1, 1, d]))
    rows = tower.tokens if siglip else tower.tokens + 1
    x = op.Add(x, graph.parameter(f"{name}.position_embedding.weight", [rows, d]))
    return x if siglip else layer_norm(graph, x, "vision_tower.pre_layrnorm", d, tower.layer_norm_eps)


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


def at_places(graph: WeightedGraph, x: ir.Value) -> ir.Value:
    """Return the patches of `x` [G,patches,D] that the input `places` [G,N] names."""
    return gathered(graph.op, x, graph.input("places", ["G", "N"], INT64))


def patch_rows(graph: WeightedGraph, tower: SquareTower, pixels: ir.Value, name: str, *, bias: bool) -> ir.Value:
    """Return [G,patches,D]: the patches, embedded by the weights `name`."""
    op, d, p = graph.op, tower.hidden_size, tower.patch_size
    weights = [graph.parameter(f"{name}.weight", [d, 3, p, p])]
    weights += [graph.parameter(f"{name}.bias", [d])] if bias else []
    patches = op.Conv(pixels, *weights, kernel_shape=[p, p], strides=[p, p])
    return op.Transpose(op.Reshape(patches, [0, d, tower.patches]), perm=[0, 2, 1])


def after_cls(graph: WeightedGraph, pixels: ir.Value, patches: ir.Value, cls: ir.Value) -> ir.Value:
    """Return [G,1+patches,D]: the embedding `cls` [1,1,D], then the `patches` of each of the G `pixels`."""
    op, end = graph.op, graph.op.Shape(cls, start=1, end=3)
    return op.Concat(op.Expand(cls, op.Concat(op.Shape(pixels, start=0, end=1), end, axis=0)), patches, axis=1)


def build_block(
    graph: WeightedGraph, vit: SquareTower, name: str, x: ir.Value, merging: Merging | None, merged: int
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
    mixed = graph.dialect.attention(op, query, key, value, bias=merging.bias if merging else None)
    mixed = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, d])
    x = op.Add(x, graph.linear(mixed, f"{name}.self_attn.out_proj", d, d, bias=True))
    if merging and merged:
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
    patches: Sequence[int],
    merging: Merging | None = None,
) -> ir.Value:
    """Return [G,N] fp32: the CLS row of softmax attention, mean over heads, at the rows from one of `patches` up to
    the other."""
    op, (first, end) = graph.op, patches
    cls = op.Cast(op.Slice(query, [0], [1], [2]), to=FLOAT)
    cls = op.Mul(cls, (vit.hidden_size // vit.num_heads) ** -0.5)
    scores = op.MatMul(cls, op.Transpose(op.Cast(key, to=FLOAT), perm=[0, 1, 3, 2]))
    scores = merging.counted(scores) if merging else scores
    row = op.ReduceMean(op.Softmax(scores, axis=-1), [1, 2], keepdims=0)
    return op.Slice(merging.of_a_place(row) if merging else row, [first], [end], [1])
