"""The vision tower of Qwen2.5-VL: windowed and full-attention blocks and the 2x2 merger, for any resolution, with the
norms and the salience the sanitizer reads.

Patches stay in the processor's order, the four of a merged token together and those in raster order. Only attention
sees windows: a block gathers its queries, keys and values into them and gathers the outcome back, so that its cost
grows with the number of windows and no order has to be undone behind the tower. What depends on the grid (window
index, rotary tables) comes from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.contract.towers import QwenTower
from sinkprune.export.graph import Dim, WeightedGraph
from sinkprune.export.models.llama import gated_mlp

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64
# Of the model's code, not its configuration.
EPSILON = 1e-6
_HIDDEN = -3.4028234663852886e38


class QwenVision(QwenTower):
    """A tower that can be written, by `build_vision`."""

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_heads

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str, size: int) -> ir.Value:
        """RMSNorm of the rows `x` [...,`size`], with the weights `name`."""
        return graph.dialect.rms_norm(graph.op, x, graph.parameter(f"{name}.weight", [size]), EPSILON)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """A block's gated layers on the rows `x` [...,D], with the weights `name`."""
        return gated_mlp(graph, x, name, self.hidden_size, self.intermediate_size, bias=True)

    def embed(self, graph: WeightedGraph) -> ir.Value:
        """[G,patches,D]: the input `pixel_values`, embedded."""
        return embedded_patches(graph, self)

    def behind(self, graph: WeightedGraph, block: int, x: ir.Value) -> list[ir.Value]:
        """[G,N,d], if the tower gives features of the rows `x` [G,patches,D] behind that block beside its tokens."""
        return []

    def merged(self, graph: WeightedGraph, x: ir.Value) -> ir.Value:
        """[G,N,d]: each merged token's patches, normed and joined, through two layers to the decoder's width."""
        op, joined = graph.op, self.hidden_size * self.merge_size**2
        x = self.norm(graph, x, "visual.merger.ln_q", self.hidden_size)
        x = graph.linear(op.Reshape(x, [0, -1, joined]), "visual.merger.mlp.0", joined, joined, bias=True)
        return graph.linear(op.Gelu(x), "visual.merger.mlp.2", joined, self.out_size, bias=True)


class _Attending(NamedTuple):
    """B sequences of T slots that attend within themselves: the frames, or the windows."""

    cos: ir.Value
    """[B,T,h/2]."""
    sin: ir.Value
    mask: ir.Value | None
    """[B,1,T,T]: True where a key is a patch; None where all are."""
    seen: ir.Value | None
    """[B,1,1,T] fp32: 1 where a slot holds a patch; None where all do."""
    gather: Callable[[ir.Value], ir.Value]
    """[G,patches,x] to [B,T,x]."""
    scatter: Callable[[ir.Value], ir.Value]
    """[B,T,x] back to [G,patches,x]."""


def build_vision(graph: WeightedGraph, vision: QwenVision) -> None:
    """`vision` of the graph contract: pixel patches of G frames to merged tokens, their norms and their salience.

    An image is one frame. Salience is the attention a token's patches receive in `salience_block`, mean
    over heads, over all patches that ask and over its own patches; patches of other windows and frames, which do not
    see it, count as zeros.
    """
    op, x = graph.op, vision.embed(graph)
    table: list[Dim] = ["G", "patches", vision.head_dim // 2]
    cos, sin = graph.input("cos", table), graph.input("sin", table)
    full = windowed = _Attending(cos, sin, None, None, lambda x: x, lambda x: x)
    if len(vision.full_attention_blocks) < vision.num_blocks:
        slots = (vision.window_side * vision.merge_size) ** 2
        index = graph.input("window_index", ["windows", slots], _INT64)
        slot = graph.input("patch_slot", ["G", "patches"], _INT64)
        windowed = _windows(graph, cos, sin, index, slot)
    salience, beside = None, []
    for block in range(vision.num_blocks):
        attending = full if block in vision.full_attention_blocks else windowed
        x, query, key = _block(graph, vision, f"visual.blocks.{block}", x, attending)
        if block == vision.salience_block:
            salience = _received(graph, vision, query, key, attending)
        beside += vision.behind(graph, block, x)
    norms = op.ReduceL2(op.Cast(x, to=_FLOAT), [-1], keepdims=0)

    def by_unit(y: ir.Value | None) -> ir.Value:
        return op.Reshape(y, [0, -1, vision.merge_size**2])

    graph.output("tokens", vision.merged(graph, x), ["G", "N", vision.out_size])
    graph.output("norms", op.ReduceMax(by_unit(norms), [-1], keepdims=0), ["G", "N"], _FLOAT)
    graph.output("salience", op.ReduceMean(by_unit(salience), [-1], keepdims=0), ["G", "N"], _FLOAT)
    if beside:
        graph.output("deepstack", op.Concat(*beside, axis=-1), ["G", "N", len(beside) * vision.out_size])


def embedded_patches(graph: WeightedGraph, vision: QwenVision) -> ir.Value:
    """[G,patches,D] of the input `pixel_values`, without a bias."""
    # Colours, frames, rows, columns of a patch
    kernel = [vision.hidden_size, 3, vision.temporal_patch_size, vision.patch_size, vision.patch_size]
    pixels = graph.input("pixel_values", ["G", "patches", prod(kernel[1:])])
    weight = graph.parameter("visual.patch_embed.proj.weight", kernel, transposed=True, flat=True)
    return graph.op.MatMul(pixels, weight)


def _windows(graph: WeightedGraph, cos: ir.Value, sin: ir.Value, index: ir.Value, slot: ir.Value) -> _Attending:
    """Patches in the windows of `index` [W,T], where -1 is an empty slot; `slot` [G,patches] is the way back."""
    op = graph.op
    # An empty slot holds the first patch, which as a key is hidden and as a query is never gathered back.
    patch = op.Max(index, 0)
    held = op.Unsqueeze(op.GreaterOrEqual(index, 0), [1, 2])
    square = op.Concat(op.Shape(index, start=0, end=1), [1], *[op.Shape(index, start=1, end=2)] * 2, axis=0)

    def flat(x: ir.Value) -> ir.Value:
        """All rows in one line, whatever they are arranged in."""
        return op.Reshape(x, op.Concat([-1], op.Shape(x, start=2), axis=0))

    def scatter(x: ir.Value) -> ir.Value:
        return op.Gather(flat(x), slot, axis=0)

    def gather(x: ir.Value) -> ir.Value:
        return op.Gather(flat(x), patch, axis=0)

    return _Attending(gather(cos), gather(sin), op.Expand(held, square), op.Cast(held, to=_FLOAT), gather, scatter)


def _block(
    graph: WeightedGraph, vision: QwenVision, name: str, x: ir.Value, attending: _Attending
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """One block on `x` [G,patches,D]; returns its output, and its rotated queries and keys [B,H,T,h]."""
    op, d = graph.op, vision.hidden_size

    def heads(y: ir.Value) -> ir.Value:
        return op.Transpose(op.Reshape(y, [0, 0, vision.num_heads, vision.head_dim]), perm=[0, 2, 1, 3])

    qkv = attending.gather(
        graph.linear(vision.norm(graph, x, f"{name}.norm1", d), f"{name}.attn.qkv", d, 3 * d, bias=True)
    )
    query, key, value = map(heads, op.Split(qkv, axis=-1, num_outputs=3, _outputs=3))
    query, key = (graph.dialect.rotary(op, y, attending.cos, attending.sin) for y in (query, key))
    mixed = graph.dialect.attention(op, query, key, value, attending.mask)
    mixed = attending.scatter(op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, d]))
    x = op.Add(x, graph.linear(mixed, f"{name}.attn.proj", d, d, bias=True))
    y = vision.mlp(graph, vision.norm(graph, x, f"{name}.norm2", d), f"{name}.mlp")
    return op.Add(x, y), query, key


def _received(
    graph: WeightedGraph, vision: QwenVision, query: ir.Value, key: ir.Value, attending: _Attending
) -> ir.Value:
    """[G,patches] fp32: the softmax attention each patch receives, mean over heads and over all patches that ask."""
    op = graph.op
    received = None
    # In a full-attention block one head after the other: its matrix has as many elements as patches squared.
    step = 1 if attending.seen is None else vision.num_heads
    for head in range(0, vision.num_heads, step):
        q, k = (op.Cast(op.Slice(y, [head], [head + step], [1]), to=_FLOAT) for y in (query, key))
        scores = op.MatMul(op.Mul(q, vision.head_dim**-0.5), op.Transpose(k, perm=[0, 1, 3, 2]))
        if attending.mask is not None:
            scores = op.Where(attending.mask, scores, _HIDDEN)
        weights = op.Softmax(scores, axis=-1)
        if attending.seen is not None:
            weights = op.MatMul(attending.seen, weights)
        column = op.ReduceSum(weights, [1, 2], keepdims=1)
        received = column if received is None else op.Add(received, column)
    total = op.Squeeze(attending.scatter(op.Transpose(op.Squeeze(received, [1]), perm=[0, 2, 1])), [2])
    patches = op.Cast(op.Size(total), to=_FLOAT)
    return op.Div(total, op.Mul(patches, float(vision.num_heads)))
