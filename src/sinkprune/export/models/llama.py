"""The Llama decoder and others of its shape, such as Gemma's: segments between cuts, and the head.

Weights have the names of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import onnx_ir as ir

from sinkprune.contract.manifest import LanguageModel
from sinkprune.export.dialects import CachedAttention, LayerCache
from sinkprune.export.graph import Dim, WeightedGraph


@dataclass(frozen=True)
class Llama:
    """A Llama-shaped decoder: the manifest's facts, and what else its graphs need."""

    facts: LanguageModel
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    """Whether the projection after attention has a bias."""
    mlp_bias: bool
    head_norms: bool = False
    """Whether each head's query and key are normed before they are rotated."""
    deepstack: int = 0
    """The number of sets of vision features; one is added to the rows after each of the first layers."""
    causal: bool = True
    """Whether a row sees the rows up to its own, and not all rows."""
    gate: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """The activation of the MLP's gate, by its name in configurations."""
    norm_offset: float = 0.0
    """What is added to the weights of norms: 1 in Gemma."""
    gives_rows: bool = True
    """Whether anything reads the rows after the last layer. If not, that layer gives keys and values only."""


def build_segment(graph: WeightedGraph, llama: Llama, layers: range) -> None:
    """Write `decoder_s` of docs/graph-contract.md: `layers` (0-based) of the decoder, with their caches."""
    facts = llama.facts
    table: list[Dim] = [1, "S", facts.head_dim // 2]
    hidden = graph.input("hidden", [1, "S", facts.hidden_size])
    cos, sin = graph.input("cos", table), graph.input("sin", table)
    length = graph.input("past_length", [1], ir.DataType.INT64)
    buffer: list[Dim] = [1, facts.num_kv_heads, "C", facts.head_dim]
    new_rows: list[Dim] = [1, facts.num_kv_heads, "S", facts.head_dim]
    pasts = {
        layer: LayerCache(
            graph.input(f"past_key_{layer}", buffer), graph.input(f"past_value_{layer}", buffer), length
        )
        for layer in layers
    }
    mask, added = None, _deepstack(graph, llama) if layers.start == 0 else []
    caches: list[tuple[ir.Value, ir.Value]] = []
    gives_rows = llama.gives_rows or layers.stop < facts.num_layers
    for layer, past in pasts.items():
        attend = partial(graph.dialect.cached_attention, graph.op, past=past, mask=mask, causal=llama.causal)
        name = f"language_model.layers.{layer}"
        if not gives_rows and layer == layers[-1]:
            normed = rms_norm(graph, llama, hidden, f"{name}.input_layernorm")
            key, value = _projected(graph, llama, name, normed, cos, sin, "kv")
            caches.append(graph.dialect.cached(graph.op, key, value, past))
            break
        hidden, query, key, attended = build_layer(graph, llama, name, hidden, cos, sin, attend)
        hidden = graph.op.Add(hidden, added[layer]) if layer < len(added) else hidden
        mask = attended.mask
        caches.append((attended.key, attended.value))
    if gives_rows:
        graph.output("hidden_out", hidden, [1, "S", facts.hidden_size])
    given = buffer if graph.dialect.CACHE == "in-place" else new_rows
    for layer, (keys, values) in zip(layers, caches, strict=True):
        graph.output(f"key_{layer}", keys, given)
        graph.output(f"value_{layer}", values, given)
    if layers.stop < facts.num_layers:
        graph.output("query", query, [1, facts.num_heads, "S", facts.head_dim])
        # A copy, because `key_<layer>` may be the same tensor, and a tensor can be an output only once.
        graph.output("key", graph.op.Identity(key), new_rows)


def build_head(graph: WeightedGraph, llama: Llama, lm_head: str) -> None:
    """Write `head` of docs/graph-contract.md: final norm and vocabulary projection, by the weights `lm_head`."""
    op, facts = graph.op, llama.facts
    hidden = graph.input("hidden", [1, "S", facts.hidden_size])
    last = op.Squeeze(op.Slice(hidden, [-1], [2**31 - 1], [1]), [0])
    normed = rms_norm(graph, llama, last, "language_model.norm")
    logits = graph.linear(normed, lm_head, facts.hidden_size, facts.vocab_size, bias=False)
    graph.output("logits", logits, [1, facts.vocab_size])


def _deepstack(graph: WeightedGraph, llama: Llama) -> list[ir.Value]:
    """Return what each of the first layers adds to its rows [1,S,d], zero for text: the parts of one input."""
    if not llama.deepstack:
        return []
    sets, width = llama.deepstack, llama.facts.hidden_size
    stacked = graph.input("deepstack", [1, "S", sets * width])
    given = graph.op.Split(stacked, axis=-1, num_outputs=sets, _outputs=sets)
    return [given] if sets == 1 else list(given)


def rms_norm(graph: WeightedGraph, llama: Llama, x: ir.Value, name: str) -> ir.Value:
    """Return the norm of the rows `x` [...,d], with the weights `name`."""
    weight = graph.parameter(f"{name}.weight", [llama.facts.hidden_size], plus=llama.norm_offset)
    return graph.dialect.rms_norm(graph.op, x, weight, llama.rms_norm_eps)


Attend = Callable[[ir.Value, ir.Value, ir.Value], CachedAttention]
"""Returns the attention of a layer's new rows, from their queries [1,H,S,h], keys and values [1,Hkv,S,h]."""
Norm = Callable[[WeightedGraph, Llama, ir.Value, str], tuple[ir.Value, ir.Value | None]]
"""Returns the norm, of a name, of rows [1,S,d], and the gate of the part that reads it; None for no gate."""


def ungated_norm(graph: WeightedGraph, llama: Llama, x: ir.Value, name: str) -> tuple[ir.Value, None]:
    """Return `rms_norm`, and no gate."""
    return rms_norm(graph, llama, x, name), None


def build_layer(
    graph: WeightedGraph,
    llama: Llama,
    name: str,
    hidden: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    attend: Attend,
    norm: Norm = ungated_norm,
) -> tuple[ir.Value, ir.Value, ir.Value, CachedAttention]:
    """Return the hidden states after the layer `name`, its rotated query and key, and its attention."""
    op, facts = graph.op, llama.facts
    d, width = facts.hidden_size, facts.num_heads * facts.head_dim

    def added(part: ir.Value, gate: ir.Value | None) -> ir.Value:
        return op.Add(hidden, part if gate is None else op.Mul(part, gate))

    x, gate = norm(graph, llama, hidden, f"{name}.input_layernorm")
    query, key, value = _projected(graph, llama, name, x, cos, sin, "qkv")
    attended = attend(query, key, value)
    mixed = op.Reshape(op.Transpose(attended.mixed, perm=[0, 2, 1, 3]), [0, 0, width])
    hidden = added(graph.linear(mixed, f"{name}.self_attn.o_proj", width, d, bias=llama.output_bias), gate)

    x, gate = norm(graph, llama, hidden, f"{name}.post_attention_layernorm")
    y = gated_mlp(graph, x, f"{name}.mlp", d, facts.intermediate_size, bias=llama.mlp_bias, gate=llama.gate)
    return added(y, gate), query, key, attended


def _projected(
    graph: WeightedGraph, llama: Llama, name: str, x: ir.Value, cos: ir.Value, sin: ir.Value, which: str
) -> list[ir.Value]:
    """Return the parts `which` of the layer `name` for its normed rows `x`, [1,H,S,h] or [1,Hkv,S,h]: `q` and `k` are
    rotated.
    """
    op, facts, own = graph.op, llama.facts, f"{name}.self_attn"
    counts = {"q": facts.num_heads, "k": facts.num_kv_heads, "v": facts.num_kv_heads}
    widths = {f"{own}.{part}_proj": counts[part] * facts.head_dim for part in which}
    y = graph.joined(x, f"{own}.{which}_proj", widths, facts.hidden_size, bias=llama.qkv_bias)
    sizes = [counts[part] for part in which]
    y = op.Transpose(op.Reshape(y, [0, 0, sum(sizes), facts.head_dim]), perm=[0, 2, 1, 3])
    if llama.head_norms:
        *turned, value = op.Split(y, sizes, axis=1, _outputs=len(sizes))
        normed = []
        for part, rows in zip(which, turned, strict=False):
            weight = graph.parameter(f"{own}.{part}_norm.weight", [facts.head_dim])
            rows = graph.dialect.rms_norm(op, rows, weight, llama.rms_norm_eps)
            normed.append(graph.dialect.rotary(op, rows, cos, sin))
        return [*normed, value]
    # Queries and keys are rotated in one call: with one row, most of an operator's time is its start.
    *sizes, last = sizes
    rows, value = op.Split(y, [sum(sizes), last], axis=1, _outputs=2)
    rows = graph.dialect.rotary(op, rows, cos, sin)
    return [*(op.Split(rows, sizes, axis=1, _outputs=len(sizes)) if len(sizes) > 1 else [rows]), value]


def gated_mlp(
    graph: WeightedGraph, x: ir.Value, name: str, width: int, inner: int, *, bias: bool, gate: str = "silu"
) -> ir.Value:
    """Return gated layers of `inner` values on the rows `x` [...,`width`], with the weights `name`.

    `gate` is the activation of the gate: `silu` or `gelu_pytorch_tanh`.
    """
    op = graph.op
    opened, up = (graph.linear(x, f"{name}.{which}_proj", width, inner, bias=bias) for which in ("gate", "up"))
    opened = op.Mul(opened, op.Sigmoid(opened)) if gate == "silu" else op.Gelu(opened, approximate="tanh")
    return graph.linear(op.Mul(opened, up), f"{name}.down_proj", inner, width, bias=bias)
