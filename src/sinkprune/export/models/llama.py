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
from sinkprune.export.dialects.cached import CachedAttention, LayerCache
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
    caches, mask, added = [], None, _deepstack(graph, llama) if layers.start == 0 else []
    for layer, past in pasts.items():
        attend = partial(graph.dialect.cached_attention, graph.op, past=past, mask=mask, causal=llama.causal)
        name = f"language_model.layers.{layer}"
        hidden, query, key, attended = build_layer(graph, llama, name, hidden, cos, sin, attend)
        hidden = graph.op.Add(hidden, added[layer]) if layer < len(added) else hidden
        mask = attended.mask
        caches.append(attended)
    graph.output("hidden_out", hidden, [1, "S", facts.hidden_size])
    given = buffer if graph.dialect.CACHE == "in-place" else new_rows
    for layer, attended in zip(layers, caches, strict=True):
        graph.output(f"key_{layer}", attended.key, given)
        graph.output(f"value_{layer}", attended.value, given)
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


def build_layer(
    graph: WeightedGraph, llama: Llama, name: str, hidden: ir.Value, cos: ir.Value, sin: ir.Value, attend: Attend
) -> tuple[ir.Value, ir.Value, ir.Value, CachedAttention]:
    """Return the hidden states after the layer `name`, its rotated query and key, and its attention."""
    op, dialect, facts = graph.op, graph.dialect, llama.facts
    d, width, kv_width = facts.hidden_size, facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim

    def heads(y: ir.Value, count: int) -> ir.Value:
        return op.Transpose(op.Reshape(y, [0, 0, count, facts.head_dim]), perm=[0, 2, 1, 3])

    def rotated(y: ir.Value, which: str) -> ir.Value:
        if llama.head_norms:
            weight = graph.parameter(f"{name}.self_attn.{which}_norm.weight", [facts.head_dim])
            y = dialect.rms_norm(op, y, weight, llama.rms_norm_eps)
        return dialect.rotary(op, y, cos, sin)

    x = rms_norm(graph, llama, hidden, f"{name}.input_layernorm")
    own = f"{name}.self_attn"
    widths = {f"{own}.q_proj": width, f"{own}.k_proj": kv_width, f"{own}.v_proj": kv_width}
    q, k, v = graph.linears(x, f"{own}.qkv_proj", widths, d, bias=llama.qkv_bias)
    query, key = rotated(heads(q, facts.num_heads), "q"), rotated(heads(k, facts.num_kv_heads), "k")
    value = heads(v, facts.num_kv_heads)
    attended = attend(query, key, value)
    mixed = op.Reshape(op.Transpose(attended.mixed, perm=[0, 2, 1, 3]), [0, 0, width])
    hidden = op.Add(hidden, graph.linear(mixed, f"{name}.self_attn.o_proj", width, d, bias=llama.output_bias))

    x = rms_norm(graph, llama, hidden, f"{name}.post_attention_layernorm")
    y = gated_mlp(graph, x, f"{name}.mlp", d, facts.intermediate_size, bias=llama.mlp_bias, gate=llama.gate)
    return op.Add(hidden, y), query, key, attended


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
