"""The vision tower of Qwen2-VL: Qwen2.5-VL's without windows, with CLIP's kind of norms and layers."""

from __future__ import annotations

import onnx_ir as ir

from sinkprune.export.graph import WeightedGraph
from sinkprune.export.qwen2_5_vision import EPSILON, Parts, QwenVision
from sinkprune.export.vit import activation


class Qwen2Vision(QwenVision):
    """Shape of a Qwen2-VL vision tower: every block attends within a whole frame."""

    @property
    def parameters(self) -> int:
        """Weights of patches, blocks and merger."""
        d, m, joined = self.hidden_size, self.intermediate_size, self.joined_size
        block = 4 * (d * d + d) + 2 * d * m + m + d + 4 * d
        merger = joined * joined + joined + joined * self.out_size + self.out_size + 2 * d
        return self.patch_values * d + self.num_blocks * block + merger


def _layer_norm(graph: WeightedGraph, x: ir.Value, name: str, size: int) -> ir.Value:
    weight, bias = graph.parameter(f"{name}.weight", [size]), graph.parameter(f"{name}.bias", [size])
    return graph.op.LayerNormalization(x, weight, bias, axis=-1, epsilon=EPSILON)


def _two_layers(graph: WeightedGraph, vision: QwenVision, name: str, x: ir.Value) -> ir.Value:
    d, m = vision.hidden_size, vision.intermediate_size
    x = activation(graph, "quick_gelu", graph.linear(x, f"{name}.fc1", d, m, bias=True))
    return graph.linear(x, f"{name}.fc2", m, d, bias=True)


QWEN2 = Parts(norm=_layer_norm, mlp=_two_layers)
"""What Qwen2-VL's blocks are made of."""
