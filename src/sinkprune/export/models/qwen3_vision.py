"""The vision tower of Qwen3-VL: Qwen2-VL's with learned positions and with DeepStack's features of blocks in between.

The table of learned positions is a square, stretched over every picture. For each patch the host computes the four
positions around it and their weights. The output `deepstack` holds the sets of features, one next to the other, that
are added after the decoder's first layers.
"""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.contract.towers import Qwen3Tower
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.qwen2_5_vision import Qwen2Vision, embedded_patches
from sinkprune.export.models.vit import two_layers

CORNERS = 4
"""The number of learned positions around a patch."""


class Qwen3Vision(Qwen2Vision, Qwen3Tower):
    """The tower of Qwen3-VL, which `build_vision` writes."""

    @property
    def mergers(self) -> int:  # type: ignore[override]
        """The tower's own, and DeepStack's."""
        return 1 + len(self.deepstack_blocks)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """Return the two layers `name` of a block, with GELU by tanh, on the rows `x` [...,D]."""
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
        """Return [G,N,d]: each merged token's patches, normed, joined and projected to the decoder's width."""
        x = graph.op.Reshape(self.norm(graph, x, "visual.merger.norm", self.hidden_size), [0, -1, self.joined_size])
        return self.projected(graph, x, _layers("visual.merger"))


def _layers(name: str) -> list[str]:
    return [f"{name}.linear_fc1", f"{name}.linear_fc2"]
