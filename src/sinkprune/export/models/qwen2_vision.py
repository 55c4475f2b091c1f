"""The vision tower of Qwen2-VL: Qwen2.5-VL's without windows, with CLIP's kind of norms and layers."""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.qwen2_5_vision import EPSILON, QwenVision
from sinkprune.export.models.vit import layer_norm, two_layers


class Qwen2Vision(QwenVision):
    """A tower whose every block attends within a whole frame."""

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str, size: int) -> ir.Value:
        """LayerNorm of the rows `x` [...,`size`], with the weights `name`."""
        return layer_norm(graph, x, name, size, EPSILON)

    def mlp(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """A block's two layers on the rows `x` [...,D], with the weights `name`."""
        return two_layers(graph, x, name, self.hidden_size, self.intermediate_size, "quick_gelu")
