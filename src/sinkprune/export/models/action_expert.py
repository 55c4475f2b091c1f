"""The action expert of pi0: one denoising step of an action chunk, over the caches of the decoder's prefix.

Its rows are the robot's state, then the actions of the chunk. The state sees the prefix and itself. An action sees
the prefix, the state and all actions (pi0, arXiv 2410.24164, section IV; transformers' `PI0Model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from sinkprune.export.dialects.cached import HIDDEN, LayerCache, attention_beside
from sinkprune.export.graph import Dim, WeightedGraph
from sinkprune.export.models.llama import Llama, build_layer, rms_norm

_FLOAT = ir.DataType.FLOAT
_INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class ActionExpert:
    """An action expert, and what its graph needs besides."""

    llama: Llama
    chunk: int
    state_dim: int
    action_dim: int


def build_expert(graph: WeightedGraph, expert: ActionExpert, segments: Sequence[range]) -> None:
    """Write `expert` of docs/graph-contract.md: an Euler step of the flow from noise to actions.

    `segments` are the layers of the decoder's segments. The caches of one segment have the same number of rows.
    """
    op, llama, facts = graph.op, expert.llama, expert.llama.facts
    rows, width = expert.chunk + 1, facts.hidden_size
    shape = [1, expert.chunk, expert.action_dim]
    actions = graph.input("actions", shape, _FLOAT)
    state = graph.input("state", [1, 1, expert.state_dim], _FLOAT)
    time, step = graph.input("time_embedding", [1, 1, width], _FLOAT), graph.input("step", [1], _FLOAT)
    cos, sin = (graph.input(table, [1, rows, facts.head_dim // 2]) for table in ("cos", "sin"))
    hidden = _embed(graph, expert, actions, state, time)
    for number, layers in enumerate(segments):
        length, mask = graph.input(f"length_{number}", [1], _INT64), None
        for layer in layers:
            buffer: list[Dim] = [1, facts.num_kv_heads, f"C{number}", facts.head_dim]
            keys, values = (graph.input(f"past_{kind}_{layer}", buffer) for kind in ("key", "value"))
            past = LayerCache(keys, values, length)
            mask = _mask(graph, expert, past) if mask is None else mask
            attend = partial(attention_beside, op, past=past, mask=mask)
            hidden, *_ = build_layer(graph, llama, f"dit.layers.{layer}", hidden, cos, sin, attend)
    normed = rms_norm(graph, llama, op.Slice(hidden, [1], [rows], [1]), "dit.norm")
    velocity = op.Cast(graph.linear(normed, "action_out_proj", width, expert.action_dim, bias=True), to=_FLOAT)
    graph.output("actions_out", op.Add(actions, op.Mul(velocity, step)), shape, _FLOAT)
    graph.output("velocity", op.Identity(velocity), shape, _FLOAT)


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


def _mask(graph: WeightedGraph, expert: ActionExpert, past: LayerCache) -> ir.Value:
    """Return [H/Hkv*rows,C+rows], added to scores: which rows of the cache and of the chunk each row sees."""
    op: Any = graph.op
    facts, rows = expert.llama.facts, expert.chunk + 1
    room = op.Shape(past.key, start=2, end=3)
    filled = op.Unsqueeze(op.Less(op.Range(0, op.Squeeze(room), 1), past.length), [0])
    # The state is row 0. It sees no action.
    place = np.arange(rows)
    own = op.Constant(value=ir.tensor((place[None] <= 0) | (place[:, None] > 0)))
    filled = op.Expand(filled, op.Concat([rows], room, axis=0))
    seen = op.Where(op.Concat(filled, own, axis=1), 0.0, HIDDEN)
    return op.CastLike(op.Tile(seen, [facts.num_heads // facts.num_kv_heads, 1]), past.key)
