"""Prismatic's vision tower as a graph: DINOv2 with registers and SigLIP on the same patches (arXiv 2402.07865).

Weights have timm's names. A token joins the rows of both. Features are those before the last block, without a norm.
Salience is DINOv2's CLS row of attention in its last computed block, as in CLIP's towers.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.manifest import FusedTower, SquareTower
from sinkprune.export.graph import FLOAT, WeightedGraph
from sinkprune.export.models.vit import cls_salience, layer_norm, patch_rows, two_layers


def build_fused(graph: WeightedGraph, tower: FusedTower) -> None:
    """Write `vision` of the graph contract: pixel values of both towers to patch tokens, norms and salience."""
    op, side, dino = graph.op, tower.image_size, tower.dino
    pixels = graph.input("pixel_values", ["G", 6, side, side])
    first, second = op.Split(pixels, axis=1, num_outputs=2, _outputs=2)
    # CLS and registers have no position.
    special = [("cls_token", 1), ("reg_token", tower.registers)]
    rows, query, key = _run(graph, dino, "vision_backbone.featurizer", first, special, scaled=True)
    own, _, _ = _run(graph, tower, "vision_backbone.fused_featurizer", second, [], scaled=False)
    patches = 1 + tower.registers
    tokens = op.Concat(op.Slice(rows, [patches], [patches + tower.tokens], [1]), own, axis=2)
    graph.output("tokens", tokens, ["G", tower.tokens, dino.hidden_size + tower.hidden_size])
    norms = op.ReduceL2(op.Cast(tokens, to=FLOAT), [-1], keepdims=0)
    graph.output("norms", norms, ["G", tower.tokens], FLOAT)
    salience = cls_salience(graph, dino, query, key, [patches, patches + tower.tokens])
    graph.output("salience", salience, ["G", tower.tokens], FLOAT)


def _run(
    graph: WeightedGraph,
    tower: SquareTower,
    name: str,
    pixels: ir.Value,
    special: list[tuple[str, int]],
    *,
    scaled: bool,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the rows [G,R,D] after the blocks of the tower `name`, and the last block's queries and keys [G,H,R,h].

    `special` are the names and numbers of the rows before the patches. With `scaled` blocks have layer scales.
    """
    op, d = graph.op, tower.hidden_size
    x = patch_rows(graph, tower, pixels, f"{name}.patch_embed.proj", bias=True)
    x = op.Add(x, graph.parameter(f"{name}.pos_embed", [1, tower.tokens, d]))
    groups = op.Shape(pixels, start=0, end=1)
    before = [
        op.Expand(graph.parameter(f"{name}.{own}", [1, count, d]), op.Concat(groups, [count, d], axis=0))
        for own, count in special
        if count
    ]
    x = op.Concat(*before, x, axis=1) if before else x
    query = key = x
    for block in range(tower.num_blocks):
        x, query, key = _build_block(graph, tower, f"{name}.blocks.{block}", x, scaled=scaled)
    return x, query, key


def _build_block(
    graph: WeightedGraph, tower: SquareTower, name: str, x: ir.Value, *, scaled: bool
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the output [G,R,D] of the block `name`, and the queries and keys [G,H,R,h] of its attention."""
    op, d, count = graph.op, tower.hidden_size, tower.num_heads

    def added(part: ir.Value, scale: str) -> ir.Value:
        if scaled:
            # transformers renames tensors that are called gamma.
            part = op.Mul(part, graph.parameter(f"{name}.{scale}.scale_factor", [d]))
        return op.Add(x, part)

    y = layer_norm(graph, x, f"{name}.norm1", d, tower.layer_norm_eps)
    joined = graph.linear(y, f"{name}.attn.qkv", d, 3 * d, bias=True)
    query, key, value = (
        op.Transpose(op.Reshape(part, [0, 0, count, d // count]), perm=[0, 2, 1, 3])
        for part in op.Split(joined, axis=-1, num_outputs=3, _outputs=3)
    )
    mixed = op.Transpose(graph.dialect.attention(op, query, key, value), perm=[0, 2, 1, 3])
    x = added(graph.linear(op.Reshape(mixed, [0, 0, d]), f"{name}.attn.proj", d, d, bias=True), "ls1")
    y = layer_norm(graph, x, f"{name}.norm2", d, tower.layer_norm_eps)
    layers, widths = [f"{name}.mlp.fc1", f"{name}.mlp.fc2"], [d, tower.intermediate_size, d]
    return added(two_layers(graph, y, layers, widths, "gelu"), "ls2"), query, key
