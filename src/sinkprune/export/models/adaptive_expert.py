"""The action expert of pi0.5: the time of a denoising step conditions its norms, and its rows are the actions alone.

Each norm multiplies by a scale, adds a shift, and gives a gate for the attention or the MLP that reads it. These are
linear functions of the embedded time (pi0.5, arXiv 2504.16054; openpi, models/gemma.py). They depend on nothing else,
so they have a graph of their own, which runs once for each time. The state is in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.action_expert import ActionExpert, give_actions, run_layers
from sinkprune.export.models.llama import Llama

_FLOAT = ir.DataType.FLOAT


def build_modulation(graph: WeightedGraph, expert: ActionExpert, segments: Sequence[range]) -> None:
    """Write `modulation` of docs/graph-contract.md: what each norm of `expert` reads of the time.

    `segments` are the layers of the decoder's segments.
    """
    op, width, kind = graph.op, expert.llama.facts.hidden_size, graph.precision.onnx
    condition = op.Cast(graph.input("time_embedding", [1, 1, width], _FLOAT), to=kind)
    for layer in ("time_mlp_in", "time_mlp_out"):
        inner = graph.linear(condition, layer, width, width, bias=True)
        condition = op.Mul(inner, op.Sigmoid(inner))
    parts = []
    for name in _norms(segments):
        made = graph.linear(condition, f"{name}.dense", width, 3 * width, bias=True)
        scale, shift, gate = op.Split(made, axis=-1, num_outputs=3, _outputs=3)
        parts += [op.Add(scale, 1.0), shift, gate]
    graph.output("modulation", op.Concat(*parts, axis=1), [1, len(parts), width])


def build_adaptive_expert(graph: WeightedGraph, expert: ActionExpert, segments: Sequence[range]) -> None:
    """Write `expert` of docs/graph-contract.md without the inputs `state` and `time_embedding`.

    `segments` are those of the decoder.
    """
    op, width, kind = graph.op, expert.llama.facts.hidden_size, graph.precision.onnx
    names = _norms(segments)
    actions = graph.input("actions", [1, expert.chunk, expert.action_dim], _FLOAT)
    modulation, step = graph.input("modulation", [1, 3 * len(names), width]), graph.input("step", [1], _FLOAT)
    parts = op.Split(modulation, axis=1, num_outputs=3 * len(names), _outputs=3 * len(names))
    ones = op.Constant(value=ir.tensor(np.ones(width, graph.precision.numpy)))

    def norm(graph: WeightedGraph, llama: Llama, x: ir.Value, name: str) -> tuple[ir.Value, ir.Value]:
        first = 3 * names.index(name)
        scale, shift, gate = parts[first : first + 3]
        normed = graph.dialect.rms_norm(op, x, ones, llama.rms_norm_eps)
        return op.Add(op.Mul(normed, scale), shift), gate

    hidden = graph.linear(op.Cast(actions, to=kind), "action_in_proj", expert.action_dim, width, bias=True)
    # Every action sees all actions.
    hidden = run_layers(graph, expert.llama, segments, hidden, np.ones((expert.chunk,) * 2, bool), norm)
    normed, _ = norm(graph, expert.llama, hidden, "dit.norm")
    give_actions(graph, expert, normed, actions, step)


def _norms(segments: Sequence[range]) -> list[str]:
    """Return the names of the expert's norms, in the order of `modulation`."""
    layers = [f"dit.layers.{layer}" for segment in segments for layer in segment]
    own = [f"{layer}.{norm}" for layer in layers for norm in ("input_layernorm", "post_attention_layernorm")]
    return [*own, "dit.norm"]
