"""The action expert of pi0.5: the time of a denoising step conditions its norms, and its rows are the actions alone.

Each norm multiplies by a scale, adds a shift, and gives a gate for the attention or the MLP that reads it. These are
linear functions of the embedded time (pi0.5, arXiv 2504.16054; openpi, models/gemma.py). The state is in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.action_expert import ActionExpert, give_actions, run_layers
from sinkprune.export.models.llama import Llama, Norm

_FLOAT = ir.DataType.FLOAT


def build_adaptive_expert(graph: WeightedGraph, expert: ActionExpert, segments: Sequence[range]) -> None:
    """Write `expert` of docs/graph-contract.md without the input `state`. `segments` are those of the decoder."""
    op, width, kind = graph.op, expert.llama.facts.hidden_size, graph.precision.onnx
    actions = graph.input("actions", [1, expert.chunk, expert.action_dim], _FLOAT)
    time, step = graph.input("time_embedding", [1, 1, width], _FLOAT), graph.input("step", [1], _FLOAT)
    condition = op.Cast(time, to=kind)
    for layer in ("time_mlp_in", "time_mlp_out"):
        inner = graph.linear(condition, layer, width, width, bias=True)
        condition = op.Mul(inner, op.Sigmoid(inner))
    hidden = graph.linear(op.Cast(actions, to=kind), "action_in_proj", expert.action_dim, width, bias=True)
    norm = _adaptive_norm(condition)
    # Every action sees all actions.
    hidden = run_layers(graph, expert.llama, segments, hidden, np.ones((expert.chunk,) * 2, bool), norm)
    normed, _ = norm(graph, expert.llama, hidden, "dit.norm")
    give_actions(graph, expert, normed, actions, step)


def _adaptive_norm(condition: ir.Value) -> Norm:
    """Return norms that the vector `condition` [1,1,d] scales, shifts and gates."""

    def norm(graph: WeightedGraph, llama: Llama, x: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        op, width = graph.op, llama.facts.hidden_size
        made = graph.linear(condition, f"{name}.dense", width, 3 * width, bias=True)
        scale, shift, gate = op.Split(made, axis=-1, num_outputs=3, _outputs=3)
        ones = op.Constant(value=ir.tensor(np.ones(width, graph.precision.numpy)))
        normed = graph.dialect.rms_norm(op, x, ones, llama.rms_norm_eps)
        return op.Add(op.Mul(normed, op.Add(scale, 1.0)), shift), gate

    return norm
