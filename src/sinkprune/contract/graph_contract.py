"""Compare the graphs of a manifest with the graph contract (docs/graph-contract.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from sinkprune.contract.manifest import EXPERT, MODULATION, Manifest, PolicyFacts, TensorSpec
from sinkprune.contract.precision import DTYPES


def contract_violations(manifest: Manifest) -> Iterator[str]:
    """Yield a message for each missing or different output, and for each input that nothing provides."""
    for graph, given, needed in _interfaces(manifest):
        spec = manifest.graphs[graph]
        outputs = {tensor.name: tensor for tensor in spec.outputs}
        # Needed tensors come one by one, so an absurd number of layers fails at its first missing tensor.
        for expected in needed:
            yield from _misfit(graph, "output", outputs.get(expected.name), expected)
        inputs = {tensor.name: tensor for tensor in given}
        for declared in spec.inputs:
            yield from _misfit(graph, "input", declared, inputs.get(declared.name))


def _misfit(graph: str, role: str, found: TensorSpec | None, expected: TensorSpec | None) -> Iterator[str]:
    if found and expected and found.dtype == expected.dtype and len(found.shape) == len(expected.shape):
        sizes = zip(found.shape, expected.shape, strict=True)
        if all(wanted is None or size == wanted for size, wanted in sizes):
            return
    words = [f"{spec.name} {spec.dtype}{list(spec.shape)}" if spec else "none" for spec in (found, expected)]
    yield (
        f"has a graph '{graph}' that does not fit the model's facts and cuts: its {role} is {words[0]}, expected "
        f"{words[1]}"
    )


def _expert(manifest: Manifest, policy: PolicyFacts) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of a policy's action expert."""
    lm, dtype = manifest.language_model, DTYPES[manifest.precision].name
    actions = (1, policy.chunk, policy.action_dim)
    takes = [TensorSpec(f"{table}", dtype, (1, policy.expert_rows, lm.head_dim // 2)) for table in ("cos", "sin")]  # type: ignore[arg-type]
    takes.append(TensorSpec("actions", "float32", actions))
    if not policy.state_in_prompt:
        takes.append(TensorSpec("state", "float32", (1, 1, policy.state_dim)))
    takes += [_time_embedding(policy), *([_modulation(manifest, policy)] if manifest.modulates else [])]
    takes += [TensorSpec("step", "float32", (1,))]
    for segment, layers in enumerate(manifest.segments):
        takes.append(TensorSpec(f"length_{segment}", "int64", (1,)))
        for name in (f"past_{kind}_{layer}" for layer in layers for kind in ("key", "value")):
            takes.append(TensorSpec(name, dtype, (1, lm.num_kv_heads, None, lm.head_dim)))  # type: ignore[arg-type]
    return takes, [TensorSpec(name, "float32", actions) for name in ("actions_out", "velocity")]


def _time_embedding(policy: PolicyFacts) -> TensorSpec:
    return TensorSpec("time_embedding", "float32", (1, 1, policy.expert.hidden_size))


def _modulation(manifest: Manifest, policy: PolicyFacts) -> TensorSpec:
    """Return the scale, the shift and the gate of each of the expert's norms: two a layer, and the last."""
    shape = (1, 3 * (2 * policy.expert.num_layers + 1), policy.expert.hidden_size)
    return TensorSpec("modulation", DTYPES[manifest.precision].name, shape)  # type: ignore[arg-type]


_Interface = tuple[str, Iterable[TensorSpec], Iterable[TensorSpec]]


def _interfaces(manifest: Manifest) -> Iterator[_Interface]:
    """Yield each graph, its available inputs and its required outputs; a size of None is any size.

    The inputs of `vision` depend on the family: the runtime checks them when it loads the family.
    """
    lm, dtype = manifest.language_model, DTYPES[manifest.precision].name
    vision = {tensor.name: tensor.shape for tensor in manifest.graphs["vision"].outputs}
    tokens, width = vision["tokens"][1:] if len(vision.get("tokens", ())) == 3 else (None, None)

    def floats(name: str, *shape: Any) -> TensorSpec:
        return TensorSpec(name, dtype, shape)  # type: ignore[arg-type]

    def rows(suffix: str = "") -> list[TensorSpec]:
        tables = [floats(f"{table}{suffix}", 1, None, lm.head_dim // 2) for table in ("cos", "sin")]
        return [floats(f"hidden{suffix}", 1, None, lm.hidden_size), *tables]

    def index(*names: str) -> list[TensorSpec]:
        return [TensorSpec(name, "int64", (None,)) for name in names]

    def heads(name: str, count: int, rows: Any = None) -> TensorSpec:
        return floats(name, 1, count, rows, lm.head_dim)

    def caches(prefix: str, layers: range, rows: Any) -> Iterator[TensorSpec]:
        for layer in layers:
            yield heads(f"{prefix}key_{layer}", lm.num_kv_heads, rows)
            yield heads(f"{prefix}value_{layer}", lm.num_kv_heads, rows)

    # Without a projector the tower's tokens are the decoder's rows.
    features = [floats("tokens", None, tokens, width if manifest.projector else lm.hidden_size)]
    features += [TensorSpec(name, "float32", (None, tokens)) for name in ("norms", "salience")]
    norms = features[1]
    # DeepStack features: the sanitizer selects them with the tokens, and the first segment adds them to the rows.
    deepstack_width = vision["deepstack"][-1] if "deepstack" in vision else None
    features += [floats("deepstack", None, tokens, deepstack_width)] if deepstack_width else []
    query, key = heads("query", lm.num_heads), heads("key", lm.num_kv_heads)
    yield "vision", manifest.graphs["vision"].inputs, features
    if manifest.projector:
        embeddings = floats("embeddings", None, None, lm.hidden_size)
        yield manifest.projector, [floats("tokens", None, None, width)], [embeddings]
    for number, layers in enumerate(manifest.segments):
        attention = [query, key] if layers.stop != lm.num_layers else []
        # The name of the output's size identifies the form of cache.
        given = {"in-place": "C", "rows": "S"}[manifest.cache]
        # Only the caches of a policy's last layer are read.
        given_rows = [] if manifest.policy and layers.stop == lm.num_layers else rows("_out")[:1]
        gives = chain([*given_rows, *attention], caches("", layers, given))
        added = [floats("deepstack", 1, None, deepstack_width)] if deepstack_width and number == 0 else []
        takes = chain(rows(), added, [TensorSpec("past_length", "int64", (1,))], caches("past_", layers, "C"))
        yield f"decoder_{number}", takes, gives
    if manifest.policy is None:
        yield "head", rows()[:1], [floats("logits", 1, lm.vocab_size)]
    else:
        yield EXPERT, *_expert(manifest, manifest.policy)
        if manifest.modulates:
            yield MODULATION, [_time_embedding(manifest.policy)], [_modulation(manifest, manifest.policy)]
    for plan in (plan for budgets in manifest.plans.values() for plan in budgets.values()):
        if plan.sanitizer:
            kept = plan.counts.kept if plan.counts else None
            # For sanitizers whose counts vary by picture: the length is the number of tokens to keep.
            quota = index("quota") if plan.evidence else []
            index_of_kept = TensorSpec("kept_index", "int64", (None, kept))
            chosen = [floats("kept_tokens", None, kept, width), index_of_kept]
            chosen += [floats("kept_deepstack", None, kept, deepstack_width)] if deepstack_width else []
            # For sanitizers that read the question: all tokens, and its words, as the decoder receives them.
            read = [floats("embeddings", None, tokens, lm.hidden_size), floats("question", None, lm.hidden_size)]
            yield plan.sanitizer, [*features, *read, *quota], chosen
        selected = [*rows(), query, key, *index("visual_index", "text_index", "visual_group", "quota"), norms]
        left = [*rows("_out"), *index("visual_index_out", "text_index_out", "keep_index")]
        if plan.evidence:
            before, *after = plan.evidence.graphs
            yield before, features[1:3], [TensorSpec("evidence", "float32", (1, None))]
            evidence = TensorSpec("evidence", "float32", (None,))
            for graph in after:
                yield graph, [*selected, *index("register")], [evidence]
            selected.append(evidence)
        for graph in plan.select_after.values():
            yield graph, selected, left
