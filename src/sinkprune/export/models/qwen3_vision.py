"""The vision tower of Qwen3-VL: Qwen2-VL's with learned positions, and DeepStack's features of blocks in between.

Learned positions lie in a square table that is stretched over every picture. Which four of them a patch lies between,
and how near to each, comes from the host. What DeepStack adds behind the decoder's first layers is the output
`deepstack`, one set beside the other.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.towers import Qwen3Tower
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.qwen2_5_vision import EPSILON, QwenVision, embedded_patches
from sinkprune.export.models.vit import layer_norm

CORNERS = 4
"""How many learned positions a patch lies between."""


class Qwen3Vision(QwenVision, Qwen3Tower):
    """A tower whose every block attends within a whole frame."""

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str, size: int) -> ir.Value:
        """LayerNorm of the rows `x` [...,`size`], with the weights `name`."""
        return layer_norm(graph, x, name, size, EPSILON)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """A block's two layers with GELU, by tanh, on the rows `x` [...,D], with the weights `name`."""
        d, inner = self.hidden_size, self.intermediate_size
        x = graph.op.Gelu(graph.linear(x, f"{name}.linear_fc1", d, inner, bias=True), approximate="tanh")
        return graph.linear(x, f"{name}.linear_fc2", inner, d, bias=True)

    def embed(self, graph: WeightedGraph) -> ir.Value:
        """[G,patches,D]: the input `pixel_values`, embedded, and the positions of the patches, as in every frame."""
        op = graph.op
        x = op.Add(embedded_patches(graph, self), graph.parameter("visual.patch_embed.proj.bias", [self.hidden_size]))
        index = graph.input("position_index", ["patches", CORNERS], ir.DataType.INT64)
        weight = graph.input("position_weight", ["patches", CORNERS])
        table = graph.parameter("visual.pos_embed.weight", [self.position_side**2, self.hidden_size])
        # Corner by corner: all at once would be four times the patches.
        for corner in range(CORNERS):
            own, share = (op.Slice(y, [corner], [corner + 1], [1]) for y in (index, weight))
            x = op.Add(x, op.Mul(op.Gather(table, op.Squeeze(own, [1]), axis=0), share))
        return x

    def behind(self, graph: WeightedGraph, block: int, x: ir.Value) -> list[ir.Value]:
        """[G,N,d], the merged rows behind a block of DeepStack: joined first and normed together."""
        if block not in self.deepstack_blocks:
            return []
        name, joined = f"visual.deepstack_merger_list.{self.deepstack_blocks.index(block)}", self._joined_size
        x = self.norm(graph, graph.op.Reshape(x, [0, -1, joined]), f"{name}.norm", joined)
        return [self._two_layers(graph, x, name)]

    def merged(self, graph: WeightedGraph, x: ir.Value) -> ir.Value:
        """[G,N,d]: each merged token's patches, normed and joined, through two layers to the decoder's width."""
        x = self.norm(graph, x, "visual.merger.norm", self.hidden_size)
        return self._two_layers(graph, graph.op.Reshape(x, [0, -1, self._joined_size]), "visual.merger")

    @property
    def _joined_size(self) -> int:
        return self.hidden_size * self.merge_size**2

    def _two_layers(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        joined = self._joined_size
        x = graph.op.Gelu(graph.linear(x, f"{name}.linear_fc1", joined, joined, bias=True))
        return graph.linear(x, f"{name}.linear_fc2", joined, self.out_size, bias=True)
