"""The vision towers of Qwen2-VL to Qwen3-VL as graphs.

With the tokens they output the norms and the salience that the sanitizer reads. Patches stay in the processor's
order: the four of a merged token together, in raster order. In Qwen2.5-VL some blocks attend within windows. Such a
block gathers its queries, keys and values into windows and gathers the result back. So its cost grows with the number
of windows, and nothing has to be reordered after the tower. The host computes what depends on the grid: the window
index and the rotary tables.

The table of learned positions is a square, stretched over every picture. For each patch the host computes the four
positions around it and their weights. The output `deepstack` holds the sets of features, one next to the other, that
are added after the decoder's first layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import onnx_ir as ir

from sinkprune.contract.manifest import Qwen3Tower, QwenTower
from sinkprune.export.graph import FLOAT, INT64, Dim, WeightedGraph
from sinkprune.export.models.llama import gated_mlp
from sinkprune.export.models.vit import layer_norm, two_layers

# Fixed in the model's code; no configuration has it.
EPSILON = 1e-6
_HIDDEN = -3.4028234663852886e38


class QwenVision(QwenTower):
    """The tower of Qwen2.5-VL, which `build_vision` writes."""

    mlp_matrices = 3
    mergers = 1

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def joined_size(self) -> int:
        """The width of a merged token's patches, joined."""
        return self.hidden_size * self.merge_size**2

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str, size: int) -> ir.Value:
        """Return the RMSNorm of the rows `x` [...,`size`], with the weights `name`."""
        return graph.dialect.rms_norm(graph.op, x, graph.parameter(f"{name}.weight", [size]), EPSILON)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """Return the gated layers `name` of a block on the rows `x` [...,D]."""
        return gated_mlp(graph, x, name, self.hidden_size, self.intermediate_size, bias=True)

    def embed(self, graph: WeightedGraph) -> ir.Value:
        """Return [G,patches,D]: the input `pixel_values`, embedded."""
        return embedded_patches(graph, self)

    def deepstack_features(self, graph: WeightedGraph, block: int, x: ir.Value) -> list[ir.Value]:
        """Return [G,N,d], the features of the rows `x` [G,patches,D] after `block`, if the tower outputs any."""
        return []

    def merged(self, graph: WeightedGraph, x: ir.Value) -> ir.Value:
        """Return [G,N,d]: each merged token's patches, normed, joined and projected to the decoder's width."""
        x = graph.op.Reshape(self.norm(graph, x, "visual.merger.ln_q", self.hidden_size), [0, -1, self.joined_size])
        return self.projected(graph, x, ["visual.merger.mlp.0", "visual.merger.mlp.2"])

    def projected(self, graph: WeightedGraph, x: ir.Value, names: Sequence[str]) -> ir.Value:
        """Return [G,N,d] of the joined patches `x`, through the two layers `names`."""
        return two_layers(graph, x, names, [self.joined_size, self.joined_size, self.out_size], "gelu")


class Qwen2Vision(QwenVision):
    """The tower of Qwen2-VL: every block attends within a whole frame, and norms and layers are CLIP's."""

    mlp_matrices = 2

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str, size: int) -> ir.Value:
        return layer_norm(graph, x, name, size, EPSILON)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        widths = [self.hidden_size, self.intermediate_size, self.hidden_size]
        return two_layers(graph, x, [f"{name}.fc1", f"{name}.fc2"], widths, "quick_gelu")


class _AttentionSequences(NamedTuple):
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
    """Write `vision` of the graph contract: pixel patches of G frames to merged tokens, their norms and salience.

    An image is one frame. Salience is the attention that a token's patches receive in `salience_block`: the mean over
    heads, over all querying patches and over its own patches. Patches of other windows and frames count as zeros.
    """
    op, x = graph.op, vision.embed(graph)
    table: list[Dim] = ["G", "patches", vision.head_dim // 2]
    cos, sin = graph.input("cos", table), graph.input("sin", table)
    full = windowed = _AttentionSequences(cos, sin, None, None, lambda x: x, lambda x: x)
    if len(vision.full_attention_blocks) < vision.num_blocks:
        slots = (vision.window_side * vision.merge_size) ** 2
        index = graph.input("window_index", ["windows", slots], INT64)
        slot = graph.input("patch_slot", ["G", "patches"], INT64)
        windowed = _windows(graph, cos, sin, index, slot)
    salience, deepstack = None, []
    for block in range(vision.num_blocks):
        attending = full if block in vision.full_attention_blocks else windowed
        x, query, key = _block(graph, vision, f"visual.blocks.{block}", x, attending)
        if block == vision.salience_block:
            salience = _received(graph, vision, query, key, attending)
        deepstack += vision.deepstack_features(graph, block, x)
    norms = op.ReduceL2(op.Cast(x, to=FLOAT), [-1], keepdims=0)

    def by_unit(y: ir.Value | None) -> ir.Value:
        return op.Reshape(y, [0, -1, vision.merge_size**2])

    graph.output("tokens", vision.merged(graph, x), ["G", "N", vision.out_size])
    graph.output("norms", op.ReduceMax(by_unit(norms), [-1], keepdims=0), ["G", "N"], FLOAT)
    graph.output("salience", op.ReduceMean(by_unit(salience), [-1], keepdims=0), ["G", "N"], FLOAT)
    if deepstack:
        graph.output("deepstack", op.Concat(*deepstack, axis=-1), ["G", "N", len(deepstack) * vision.out_size])


def embedded_patches(graph: WeightedGraph, vision: QwenVision) -> ir.Value:
    """Return [G,patches,D] of the input `pixel_values`, embedded without a bias."""
    # The colours, frames, rows and columns of a patch
    kernel = [vision.hidden_size, 3, vision.temporal_patch_size, vision.patch_size, vision.patch_size]
    pixels = graph.input("pixel_values", ["G", "patches", prod(kernel[1:])])
    weight = graph.parameter("visual.patch_embed.proj.weight", kernel, transposed=True, flat=True)
    return graph.op.MatMul(pixels, weight)


def _windows(
    graph: WeightedGraph, cos: ir.Value, sin: ir.Value, index: ir.Value, slot: ir.Value
) -> _AttentionSequences:
    """Return attention within the windows `index` [W,T], -1 for empty slots; `slot` [G,patches] is its inverse."""
    op = graph.op
    # An empty slot holds the first patch: a masked key, and a query that is never gathered back.
    patch = op.Max(index, 0)
    held = op.Unsqueeze(op.GreaterOrEqual(index, 0), [1, 2])
    square = op.Concat(op.Shape(index, start=0, end=1), [1], *[op.Shape(index, start=1, end=2)] * 2, axis=0)

    def flat(x: ir.Value) -> ir.Value:
        """Return all rows in one line."""
        return op.Reshape(x, op.Concat([-1], op.Shape(x, start=2), axis=0))

    def scatter(x: ir.Value) -> ir.Value:
        return op.Gather(flat(x), slot, axis=0)

    def gather(x: ir.Value) -> ir.Value:
        return op.Gather(flat(x), patch, axis=0)

    return _AttentionSequences(
        gather(cos), gather(sin), op.Expand(held, square), op.Cast(held, to=FLOAT), gather, scatter
    )


def _block(
    graph: WeightedGraph, vision: QwenVision, name: str, x: ir.Value, attending: _AttentionSequences
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the output of a block on `x` [G,patches,D], and its rotated queries and keys [B,H,T,h]."""
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
    graph: WeightedGraph, vision: QwenVision, query: ir.Value, key: ir.Value, attending: _AttentionSequences
) -> ir.Value:
    """Return [G,patches] fp32: the softmax attention that each patch receives, mean over heads and queries."""
    op = graph.op
    received = None
    # In a full-attention block one head at a time, because its matrix is [patches,patches].
    step = 1 if attending.seen is None else vision.num_heads
    for head in range(0, vision.num_heads, step):
        q, k = (op.Cast(op.Slice(y, [head], [head + step], [1]), to=FLOAT) for y in (query, key))
        scores = op.MatMul(op.Mul(q, vision.head_dim**-0.5), op.Transpose(k, perm=[0, 1, 3, 2]))
        if attending.mask is not None:
            scores = op.Where(attending.mask, scores, _HIDDEN)
        weights = op.Softmax(scores, axis=-1)
        if attending.seen is not None:
            weights = op.MatMul(attending.seen, weights)
        column = op.ReduceSum(weights, [1, 2], keepdims=1)
        received = column if received is None else op.Add(received, column)
    total = op.Squeeze(attending.scatter(op.Transpose(op.Squeeze(received, [1]), perm=[0, 2, 1])), [2])
    patches = op.Cast(op.Size(total), to=FLOAT)
    return op.Div(total, op.Mul(patches, float(vision.num_heads)))


CORNERS = 4
"""The number of learned positions around a patch."""


class Qwen3Vision(Qwen2Vision, Qwen3Tower):
    """The tower of Qwen3-VL, which `build_vision` writes."""

    @property
    def mergers(self) -> int:  # type: ignore[override]
        """The tower's own, and DeepStack's."""
        return 1 + len(self.deepstack_blocks)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        widths = [self.hidden_size, self.intermediate_size, self.hidden_size]
        return two_layers(graph, x, _layers(name), widths, "gelu_pytorch_tanh")

    def embed(self, graph: WeightedGraph) -> ir.Value:
        """Return [G,patches,D]: the embedded input `pixel_values`, plus the same positions in every frame."""
        op = graph.op
        x = op.Add(embedded_patches(graph, self), graph.parameter("visual.patch_embed.proj.bias", [self.hidden_size]))
        index = graph.input("position_index", ["patches", CORNERS], ir.DataType.INT64)
        weight = graph.input("position_weight", ["patches", CORNERS])
        table = graph.parameter("visual.pos_embed.weight", [self.position_side**2, self.hidden_size])
        # Corner by corner, because all at once would need four times the memory of the patches.
        for corner in range(CORNERS):
            own, share = (op.Slice(y, [corner], [corner + 1], [1]) for y in (index, weight))
            x = op.Add(x, op.Mul(op.Gather(table, op.Squeeze(own, [1]), axis=0), share))
        return x

    def deepstack_features(self, graph: WeightedGraph, block: int, x: ir.Value) -> list[ir.Value]:
        """Return [G,N,d], the merged rows after a block of DeepStack: joined first, then normed together."""
        if block not in self.deepstack_blocks:
            return []
        name = f"visual.deepstack_merger_list.{self.deepstack_blocks.index(block)}"
        joined = graph.op.Reshape(x, [0, -1, self.joined_size])
        return [self.projected(graph, self.norm(graph, joined, f"{name}.norm", self.joined_size), _layers(name))]

    def merged(self, graph: WeightedGraph, x: ir.Value) -> ir.Value:
        x = graph.op.Reshape(self.norm(graph, x, "visual.merger.norm", self.hidden_size), [0, -1, self.joined_size])
        return self.projected(graph, x, _layers("visual.merger"))


def _layers(name: str) -> list[str]:
    return [f"{name}.linear_fc1", f"{name}.linear_fc2"]
