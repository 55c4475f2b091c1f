"""The Llama decoder, and others of its shape, as segments between cuts, and its head.

Names of weights are the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sinkprune.contract.manifest import LanguageModel
from sinkprune.export.graph import Dim, WeightedGraph


@dataclass(frozen=True)
class Llama:
    """What a Llama-shaped decoder needs beside the manifest's facts."""

    facts: LanguageModel
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    """Whether the projection behind attention has a bias."""
    mlp_bias: bool


def build_segment(graph: WeightedGraph, llama: Llama, layers: range) -> None:
    """`decoder_s` of docs/graph-contract.md: `layers` (0-based) of the decoder, with their caches."""
    facts = llama.facts
    is_last = layers.stop == facts.num_layers
    table: list[Dim] = [1, "S", facts.head_dim // 2]
    hidden = graph.input("hidden", [1, "S", facts.hidden_size])
    cos, sin = graph.input("cos", table), graph.input("sin", table)
    past = {
        layer: (
            graph.input(f"past_key_{layer}", [1, facts.num_kv_heads, "P", facts.head_dim]),
            graph.input(f"past_value_{layer}", [1, facts.num_kv_heads, "P", facts.head_dim]),
        )
        for layer in layers
    }
    mask = _causal_mask(graph, hidden, past[layers.start][0])
    cache: list[Dim] = [1, facts.num_kv_heads, "P + S", facts.head_dim]
    caches = []
    query = None
    for layer in layers:
        hidden, query, key, value = _layer(graph, llama, layer, hidden, cos, sin, *past[layer], mask)
        caches.append((layer, key, value))
    graph.output("hidden_out", hidden, [1, "S", facts.hidden_size])
    for layer, key, value in caches:
        graph.output(f"key_{layer}", key, cache)
        graph.output(f"value_{layer}", value, cache)
    if query is not None and not is_last:
        graph.output("query", query, [1, facts.num_heads, "S", facts.head_dim])


def build_head(graph: WeightedGraph, llama: Llama, lm_head: str) -> None:
    """`head` of docs/graph-contract.md: final norm and vocabulary projection of the last row; `lm_head` names its
    weights."""
    op, facts = graph.op, llama.facts
    hidden = graph.input("hidden", [1, "S", facts.hidden_size])
    last = op.Squeeze(op.Slice(hidden, [-1], [2**31 - 1], [1]), [0])
    weight = graph.parameter("language_model.norm.weight", [facts.hidden_size])
    normed = graph.dialect.rms_norm(op, last, weight, llama.rms_norm_eps)
    logits = graph.linear(normed, lm_head, facts.hidden_size, facts.vocab_size, bias=False)
    graph.output("logits", logits, [1, facts.vocab_size])


def _causal_mask(graph: WeightedGraph, hidden: ir.Value, past_key: ir.Value) -> ir.Value:
    """[S, P+S] bool, aligned bottom-right: row r sees keys 0 ... P+r."""
    op = graph.op
    new = op.Squeeze(op.Shape(hidden, start=1, end=2))
    past = op.Squeeze(op.Shape(past_key, start=2, end=3))
    rows = op.Unsqueeze(op.Range(past, op.Add(past, new), 1), [1])
    keys = op.Unsqueeze(op.Range(0, op.Add(past, new), 1), [0])
    return op.LessOrEqual(keys, rows)


def _layer(
    graph: WeightedGraph,
    llama: Llama,
    layer: int,
    hidden: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    past_key: ir.Value,
    past_value: ir.Value,
    mask: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """One decoder layer; returns hidden, the rotated query, and the grown key and value caches."""
    op, dialect, facts, name = graph.op, graph.dialect, llama.facts, f"language_model.layers.{layer}"
    d, m = facts.hidden_size, facts.intermediate_size

    def norm(x: ir.Value, which: str) -> ir.Value:
        return dialect.rms_norm(op, x, graph.parameter(f"{name}.{which}.weight", [d]), llama.rms_norm_eps)

    def heads(x: ir.Value, which: str, count: int) -> ir.Value:
        y = graph.linear(x, f"{name}.self_attn.{which}", d, count * facts.head_dim, bias=llama.qkv_bias)
        return op.Transpose(op.Reshape(y, [0, 0, count, facts.head_dim]), perm=[0, 2, 1, 3])

    x = norm(hidden, "input_layernorm")
    query = dialect.rotary(op, heads(x, "q_proj", facts.num_heads), cos, sin)
    key = dialect.rotary(op, heads(x, "k_proj", facts.num_kv_heads), cos, sin)
    key = op.Concat(past_key, key, axis=2)
    value = op.Concat(past_value, heads(x, "v_proj", facts.num_kv_heads), axis=2)
    mixed = dialect.attention(op, query, key, value, mask)
    mixed = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, facts.num_heads * facts.head_dim])
    width = facts.num_heads * facts.head_dim
    hidden = op.Add(hidden, graph.linear(mixed, f"{name}.self_attn.o_proj", width, d, bias=llama.output_bias))

    x = norm(hidden, "post_attention_layernorm")
    gate = graph.linear(x, f"{name}.mlp.gate_proj", d, m, bias=llama.mlp_bias)
    up = graph.linear(x, f"{name}.mlp.up_proj", d, m, bias=llama.mlp_bias)
    gated = op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)
    hidden = op.Add(hidden, graph.linear(gated, f"{name}.mlp.down_proj", m, d, bias=llama.mlp_bias))
    return hidden, query, key, value
