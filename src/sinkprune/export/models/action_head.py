"""OpenVLA-OFT's action head and the row of its robot's state, as graphs (arXiv 2502.19645).

The decoder runs once. Rows of its output become a chunk of actions, without denoising and without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.llama import Llama, rms_norm
from sinkprune.export.models.vit import layer_norm

_FLOAT = ir.DataType.FLOAT
# PyTorch's default.
_EPSILON = 1e-5


@dataclass(frozen=True)
class ActionHead:
    """The sizes of an action head, and of the projector of the state."""

    chunk: int
    action_dim: int
    blocks: int
    """Residual blocks of the head."""
    state_dim: int
    """The numbers of the state; 0 where no row has the state."""


def build_action_head(graph: WeightedGraph, llama: Llama, head: ActionHead) -> None:
    """Write `action_head` of docs/policy-graphs.md: the last rows of the decoder to a chunk of actions."""
    op, d, rows = graph.op, llama.facts.hidden_size, head.chunk * head.action_dim
    hidden = graph.input("hidden", [1, "S", d])
    # Each row predicts the next: the first is the one before the placeholders. The last placeholder and the stop
    # token are read by other rows only.
    read = op.Slice(hidden, [-rows - 2], [-2], [1])
    normed = rms_norm(graph, llama, read, "language_model.norm")
    wide, name = head.action_dim * d, "action_head.model"
    x = op.Reshape(normed, [1, head.chunk, wide])
    x = layer_norm(graph, x, f"{name}.layer_norm1", wide, _EPSILON)
    x = op.Relu(graph.linear(x, f"{name}.fc1", wide, d, bias=True))
    for block in range(head.blocks):
        own = f"{name}.mlp_resnet_blocks.{block}.ffn"
        y = layer_norm(graph, x, f"{own}.0", d, _EPSILON)
        x = op.Add(x, op.Relu(graph.linear(y, f"{own}.1", d, d, bias=True)))
    x = layer_norm(graph, x, f"{name}.layer_norm2", d, _EPSILON)
    x = graph.linear(x, f"{name}.fc2", d, head.action_dim, bias=True)
    graph.output("actions_out", op.Cast(x, to=_FLOAT), [1, head.chunk, head.action_dim], _FLOAT)


def build_state_projector(graph: WeightedGraph, llama: Llama, head: ActionHead) -> None:
    """Write `state_projector` of docs/policy-graphs.md: the normalised state to a row of the prompt."""
    op, d, name = graph.op, llama.facts.hidden_size, "proprio_projector"
    state = op.Cast(graph.input("state", [1, 1, head.state_dim], _FLOAT), to=graph.precision.onnx)
    # Floats in every form of weights: a state has fewer numbers than a block.
    weight = graph.parameter(f"{name}.fc1.weight", [d, head.state_dim], transposed=True)
    x = op.Gelu(op.Add(op.MatMul(state, weight), graph.parameter(f"{name}.fc1.bias", [d])))
    graph.output("state_row", graph.linear(x, f"{name}.fc2", d, d, bias=True), [1, 1, d])
