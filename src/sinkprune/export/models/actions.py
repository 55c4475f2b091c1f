"""The parts of policies that make actions, as graphs: action experts of pi0 and pi0.5, and OpenVLA-OFT's head.

The rows of an expert are the robot's state, then the actions of the chunk. The state sees the prefix and itself. An
action sees the prefix, the state and all actions (pi0, arXiv 2410.24164, section IV; transformers' `PI0Model`).

Each norm multiplies by a scale, adds a shift, and gives a gate for the attention or the MLP that reads it. These are
linear functions of the embedded time (pi0.5, arXiv 2504.16054; openpi, models/gemma.py). They depend on nothing else,
so they have a graph of their own, which runs once for each time. The state is in the prompt.

Before the head of OpenVLA-OFT (arXiv 2502.19645) the decoder runs once. Rows of its output become a chunk of
actions, without denoising and without tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from sinkprune.contract.manifest import LanguageModel
from sinkprune.contract.precision import Array
from sinkprune.export.dialects import HIDDEN, LayerCache
from sinkprune.export.dialects.opset20 import attention_beside
from sinkprune.export.graph import FLOAT, INT64, Dim, WeightedGraph
from sinkprune.export.models.llama import Llama, Norm, build_layer, rms_norm, ungated_norm
from sinkprune.export.models.vit import layer_norm

# PyTorch's default.
_EPSILON = 1e-5


@dataclass(frozen=True)
class ActionExpert:
    """An action expert, and what its graph needs besides. One that takes no state has no use for `state_dim`."""

    llama: Llama
    chunk: int
    state_dim: int
    action_dim: int
    most_held: int = 0
    """The most held actions of the training, whose time is 0; 0 if all actions had one time."""


def build_expert(graph: WeightedGraph, expert: ActionExpert, segments: Sequence[range]) -> None:
    """Write `expert` of docs/graph-contract.md: an Euler step of the flow from noise to actions.

    `segments` are the layers of the decoder's segments. The caches of one segment have the same number of rows.
    """
    facts = expert.llama.facts
    rows, width = expert.chunk + 1, facts.hidden_size
    actions = graph.input("actions", [1, expert.chunk, expert.action_dim], FLOAT)
    state = graph.input("state", [1, 1, expert.state_dim], FLOAT)
    time, step = graph.input("time_embedding", [1, 1, width], FLOAT), graph.input("step", [1], FLOAT)
    hidden = _embed(graph, expert, actions, state, time)
    # The state is row 0. It sees no action.
    place = np.arange(rows)
    hidden = run_layers(graph, expert.llama, segments, hidden, (place[None] <= 0) | (place[:, None] > 0))
    normed = rms_norm(graph, expert.llama, graph.op.Slice(hidden, [1], [rows], [1]), "dit.norm")
    give_actions(graph, expert, normed, actions, step)


def run_layers(
    graph: WeightedGraph,
    llama: Llama,
    segments: Sequence[range],
    hidden: ir.Value,
    sees: Array,
    norm: Norm = ungated_norm,
) -> ir.Value:
    """Return the rows [1,S,d] after all layers of an expert over the caches of `segments`, which become inputs.

    Every row sees the caches. `sees` [S,S] is True for the rows of the chunk that a row sees.
    """
    facts, rows = llama.facts, len(sees)
    cos, sin = (graph.input(table, [1, rows, facts.head_dim // 2]) for table in ("cos", "sin"))
    for number, layers in enumerate(segments):
        length, mask = graph.input(f"length_{number}", [1], INT64), None
        for layer in layers:
            buffer: list[Dim] = [1, facts.num_kv_heads, f"C{number}", facts.head_dim]
            keys, values = (graph.input(f"past_{kind}_{layer}", buffer) for kind in ("key", "value"))
            past = LayerCache(keys, values, length)
            mask = _mask(graph, facts, past, sees) if mask is None else mask
            attend = partial(attention_beside, graph.op, past=past, mask=mask)
            hidden, *_ = build_layer(graph, llama, f"dit.layers.{layer}", hidden, cos, sin, attend, norm)
    return hidden


def give_actions(
    graph: WeightedGraph, expert: ActionExpert, normed: ir.Value, actions: ir.Value, step: ir.Value
) -> None:
    """Write the outputs of an expert, from the `normed` rows [1,chunk,d] of `actions`."""
    op, width, shape = graph.op, expert.llama.facts.hidden_size, [1, expert.chunk, expert.action_dim]
    velocity = op.Cast(graph.linear(normed, "action_out_proj", width, expert.action_dim, bias=True), to=FLOAT)
    graph.output("actions_out", op.Add(actions, op.Mul(velocity, step)), shape, FLOAT)
    graph.output("velocity", op.Identity(velocity), shape, FLOAT)


def _embed(
    graph: WeightedGraph, expert: ActionExpert, actions: ir.Value, state: ir.Value, time: ir.Value
) -> ir.Value:
    """Return [1,1+chunk,d]: the state, and the actions at the embedded `time` [1,1,d]."""
    op, width, kind = graph.op, expert.llama.facts.hidden_size, graph.precision.onnx
    moment = op.Expand(op.Cast(time, to=kind), [1, expert.chunk, width])
    moved = graph.linear(op.Cast(actions, to=kind), "action_in_proj", expert.action_dim, width, bias=True)
    joined = op.Concat(moved, moment, axis=2)
    inner = graph.linear(joined, "action_time_mlp_in", 2 * width, width, bias=True)
    moved = graph.linear(op.Mul(inner, op.Sigmoid(inner)), "action_time_mlp_out", width, width, bias=True)
    own = graph.linear(op.Cast(state, to=kind), "state_proj", expert.state_dim, width, bias=True)
    return op.Concat(own, moved, axis=1)


def _mask(graph: WeightedGraph, facts: LanguageModel, past: LayerCache, sees: Array) -> ir.Value:
    """Return [H/Hkv*S,C+S], added to scores: which rows of the cache and of the chunk each row sees."""
    op: Any = graph.op
    room = op.Shape(past.key, start=2, end=3)
    filled = op.Unsqueeze(op.Less(op.Range(0, op.Squeeze(room), 1), past.length), [0])
    filled = op.Expand(filled, op.Concat([len(sees)], room, axis=0))
    seen = op.Where(op.Concat(filled, op.Constant(value=ir.tensor(sees)), axis=1), 0.0, HIDDEN)
    return op.CastLike(op.Tile(seen, [facts.num_heads // facts.num_kv_heads, 1]), past.key)


def build_modulation(graph: WeightedGraph, expert: ActionExpert, segments: Sequence[range]) -> None:
    """Write `modulation` of docs/graph-contract.md: what each norm of `expert` reads of the time.

    `segments` are the layers of the decoder's segments.
    """
    op, width, kind = graph.op, expert.llama.facts.hidden_size, graph.precision.onnx
    condition = op.Cast(graph.input("time_embedding", [1, 1, width], FLOAT), to=kind)
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
    actions = graph.input("actions", [1, expert.chunk, expert.action_dim], FLOAT)
    modulation, step = graph.input("modulation", [1, 3 * len(names), width]), graph.input("step", [1], FLOAT)
    parts = op.Split(modulation, axis=1, num_outputs=3 * len(names), _outputs=3 * len(names))
    if expert.most_held:
        still = graph.input("modulation_held", [1, 3 * len(names), width])
        rows = op.Constant(value=ir.tensor(np.arange(expert.chunk)[None, :, None]))
        is_held = op.Less(rows, graph.input("held", [1], INT64))
        held_parts = op.Split(still, axis=1, num_outputs=len(parts), _outputs=len(parts))
        parts = [op.Where(is_held, own, part) for own, part in zip(held_parts, parts, strict=True)]
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
    graph.output("actions_out", op.Cast(x, to=FLOAT), [1, head.chunk, head.action_dim], FLOAT)


def build_state_projector(graph: WeightedGraph, llama: Llama, head: ActionHead) -> None:
    """Write `state_projector` of docs/policy-graphs.md: the normalised state to a row of the prompt."""
    op, d, name = graph.op, llama.facts.hidden_size, "proprio_projector"
    state = op.Cast(graph.input("state", [1, 1, head.state_dim], FLOAT), to=graph.precision.onnx)
    # Floats in every form of weights: a state has fewer numbers than a block.
    weight = graph.parameter(f"{name}.fc1.weight", [d, head.state_dim], transposed=True)
    x = op.Gelu(op.Add(op.MatMul(state, weight), graph.parameter(f"{name}.fc1.bias", [d])))
    graph.output("state_row", graph.linear(x, f"{name}.fc2", d, d, bias=True), [1, 1, d])
