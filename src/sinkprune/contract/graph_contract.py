"""Compare the graphs of a manifest with the graph contract (docs/graph-contract.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from sinkprune.contract.budgets import BARLESS_TOWER, TOWER, Plan
from sinkprune.contract.manifest import (
    ACTION_HEAD,
    EXPERT,
    MODULATION,
    STATE_PROJECTOR,
    LanguageModel,
    Manifest,
    PolicyFacts,
    TensorSpec,
)
from sinkprune.contract.precision import DTYPES


def contract_violations(manifest: Manifest) -> Iterator[str]:
    """Yield a message for each missing or different output, and for each input that nothing provides."""
    for graph, given, needed in _Interfaces(manifest).of_all_graphs():
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


_Interface = tuple[str, Iterable[TensorSpec], Iterable[TensorSpec]]
"""A graph, its available inputs and its required outputs."""


class _Interfaces:
    """The interfaces that a manifest's facts require of its graphs; a size of None is any size."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._lm = manifest, manifest.language_model
        vision = {tensor.name: tensor.shape for tensor in manifest.graphs["vision"].outputs}
        self._tokens, self._width = vision["tokens"][1:] if len(vision.get("tokens", ())) == 3 else (None, None)
        self._deepstack_width = vision["deepstack"][-1] if "deepstack" in vision else None
        self._query, self._key = self._heads("query", self._lm.num_heads), self._heads("key", self._lm.num_kv_heads)

    def of_all_graphs(self) -> Iterator[_Interface]:
        """Yield the interface of each graph.

        The inputs of `vision` depend on the family: the runtime checks them when it loads the family.
        """
        manifest, lm = self._manifest, self._lm
        yield TOWER, manifest.graphs[TOWER].inputs, self._features(self._tokens)
        towers = {plan.tower: plan for plans in manifest.plans.values() for plan in plans.values() if plan.tower}
        for tower, plan in towers.items():
            takes, gives = [*manifest.graphs[TOWER].inputs], self._features(self._tokens_of(plan))
            if tower == BARLESS_TOWER:
                takes.append(TensorSpec("places", "int64", (None, None)))
            else:
                gives.append(TensorSpec("merged", "int64", (None, self._tokens)))
            yield tower, takes, gives
        if manifest.projector:
            embeddings = self._floats("embeddings", None, None, lm.hidden_size)
            yield manifest.projector, [self._floats("tokens", None, None, self._width)], [embeddings]
        for number, layers in enumerate(manifest.segments):
            yield f"decoder_{number}", *self._decoder(number, layers)
        policy = manifest.policy
        if manifest.decodes or policy is None:
            yield "head", self._rows()[:1], [self._floats("logits", 1, lm.vocab_size)]
        elif policy.expert is None:
            yield from self._of_rows(policy)
        else:
            yield from self._of_expert(policy, policy.expert)
        for plans in manifest.plans.values():
            for plan in plans.values():
                yield from self._of_plan(plan)

    def _decoder(self, number: int, layers: range) -> tuple[Iterable[TensorSpec], Iterable[TensorSpec]]:
        """Return the inputs and outputs of a segment, one by one: an absurd number of layers takes no memory."""
        is_last = layers.stop == self._lm.num_layers
        gives = [] if self._manifest.reads_caches and is_last else self._rows("_out")[:1]
        gives += [] if is_last else [self._query, self._key]
        takes = [*self._rows(), *(self._deepstack("deepstack", 1, None) if number == 0 else [])]
        takes.append(TensorSpec("past_length", "int64", (1,)))
        # The name of the output's size identifies the form of cache.
        given = {"in-place": "C", "rows": "S"}[self._manifest.cache]
        return chain(takes, self._caches("past_", layers, "C")), chain(gives, self._caches("", layers, given))

    def _of_rows(self, policy: PolicyFacts) -> Iterator[_Interface]:
        """Yield the interfaces of a policy's action head, and of the graph of the row that has the state."""
        actions = TensorSpec("actions_out", "float32", (1, policy.chunk, policy.action_dim))
        yield ACTION_HEAD, self._rows()[:1], [actions]
        if policy.state_dim:
            state = TensorSpec("state", "float32", (1, 1, policy.state_dim))
            yield STATE_PROJECTOR, [state], [self._floats("state_row", 1, 1, self._lm.hidden_size)]

    def _of_expert(self, policy: PolicyFacts, expert: LanguageModel) -> Iterator[_Interface]:
        """Yield the interfaces of a policy's action expert, and of the graph of its modulation."""
        embedding = TensorSpec("time_embedding", "float32", (1, 1, expert.hidden_size))
        # The scale, the shift and the gate of each of the expert's norms: two a layer, and the last.
        rows = 3 * (2 * expert.num_layers + 1)
        modulation = [self._floats("modulation", 1, rows, expert.hidden_size)]
        actions = (1, policy.chunk, policy.action_dim)
        takes = [self._floats(table, 1, policy.expert_rows, self._lm.head_dim // 2) for table in ("cos", "sin")]
        takes.append(TensorSpec("actions", "float32", actions))
        if not policy.state_in_prompt:
            takes.append(TensorSpec("state", "float32", (1, 1, policy.state_dim)))
        takes += [embedding, *(modulation if self._manifest.modulates else [])]
        takes.append(TensorSpec("step", "float32", (1,)))
        if policy.most_held:
            held = self._floats("modulation_held", 1, rows, expert.hidden_size)
            takes += [held, TensorSpec("held", "int64", (1,))]
        for segment, layers in enumerate(self._manifest.segments):
            takes.append(TensorSpec(f"length_{segment}", "int64", (1,)))
            for name in (f"past_{kind}_{layer}" for layer in layers for kind in ("key", "value")):
                takes.append(self._heads(name, self._lm.num_kv_heads))
        yield EXPERT, takes, [TensorSpec(name, "float32", actions) for name in ("actions_out", "velocity")]
        if self._manifest.modulates:
            yield MODULATION, [embedding], modulation

    def _of_plan(self, plan: Plan) -> Iterator[_Interface]:
        """Yield the interfaces of the graphs of a plan."""
        width, tokens = self._lm.hidden_size, self._tokens_of(plan)
        features = self._features(tokens)
        if plan.sanitizer:
            kept = plan.counts.kept if plan.counts else None
            # For sanitizers that read the question: all tokens, and its words, as the decoder receives them.
            read = [self._floats("embeddings", None, tokens, width), self._floats("question", None, width)]
            chosen = [
                self._floats("kept_tokens", None, kept, self._width),
                TensorSpec("kept_index", "int64", (None, kept)),
                *self._deepstack("kept_deepstack", None, kept),
            ]
            yield plan.sanitizer, [*features, *read], chosen
        indices = _index("visual_index", "text_index", "visual_group", "quota")
        given = [*self._rows(), self._query, self._key, *indices, *features[1:2]]
        left = [*self._rows("_out"), *_index("visual_index_out", "text_index_out", "keep_index")]
        for graph in plan.select_after.values():
            yield graph, given, left

    def _tokens_of(self, plan: Plan) -> Any:
        if plan.tower == BARLESS_TOWER:
            return None
        return self._manifest.tokens_of(plan) if plan.tower else self._tokens

    def _features(self, tokens: Any) -> list[TensorSpec]:
        """Return the outputs of a tower that gives so many tokens of each group."""
        # Without a projector the tower's tokens are the decoder's rows.
        width = self._width if self._manifest.projector else self._lm.hidden_size
        values = [TensorSpec(name, "float32", (None, tokens)) for name in ("norms", "salience")]
        # The sanitizer selects DeepStack's features with the tokens, and the first segment adds them to the rows.
        return [self._floats("tokens", None, tokens, width), *values, *self._deepstack("deepstack", None, tokens)]

    def _floats(self, name: str, *shape: Any) -> TensorSpec:
        return TensorSpec(name, DTYPES[self._manifest.precision].name, shape)  # type: ignore[arg-type]

    def _rows(self, suffix: str = "") -> list[TensorSpec]:
        tables = [self._floats(f"{table}{suffix}", 1, None, self._lm.head_dim // 2) for table in ("cos", "sin")]
        return [self._floats(f"hidden{suffix}", 1, None, self._lm.hidden_size), *tables]

    def _deepstack(self, name: str, *shape: Any) -> list[TensorSpec]:
        return [self._floats(name, *shape, self._deepstack_width)] if self._deepstack_width else []

    def _heads(self, name: str, count: int, rows: Any = None) -> TensorSpec:
        return self._floats(name, 1, count, rows, self._lm.head_dim)

    def _caches(self, prefix: str, layers: range, rows: Any) -> Iterator[TensorSpec]:
        for layer in layers:
            yield self._heads(f"{prefix}key_{layer}", self._lm.num_kv_heads, rows)
            yield self._heads(f"{prefix}value_{layer}", self._lm.num_kv_heads, rows)


def _index(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, "int64", (None,)) for name in names]
