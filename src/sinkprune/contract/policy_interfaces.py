"""The interfaces of a robot policy's graphs: its action expert, or the head of rows that become actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sinkprune.contract.manifest import ACTION_HEAD, EXPERT, MODULATION, STATE_PROJECTOR, Manifest, TensorSpec
from sinkprune.contract.model_facts import LanguageModel, PolicyFacts

if TYPE_CHECKING:
    from sinkprune.contract.bundle import Interface, Interfaces


def policy_interfaces(manifest: Manifest, policy: PolicyFacts, own: Interfaces) -> Iterator[Interface]:
    """Yield the interface of each graph of a policy, from its tensors' forms in `own`."""
    if policy.expert is None:
        yield from _of_rows(manifest.language_model, policy, own)
    else:
        yield from _of_expert(manifest, policy, policy.expert, own)


def _of_rows(lm: LanguageModel, policy: PolicyFacts, own: Interfaces) -> Iterator[Interface]:
    """Yield the interfaces of a policy's action head, and of the graph of the row that has the state."""
    actions = TensorSpec("actions_out", "float32", (1, policy.chunk, policy.action_dim))
    yield ACTION_HEAD, own.rows()[:1], [actions]
    if policy.state_dim:
        state = TensorSpec("state", "float32", (1, 1, policy.state_dim))
        yield STATE_PROJECTOR, [state], [own.floats("state_row", 1, 1, lm.hidden_size)]


def _of_expert(
    manifest: Manifest, policy: PolicyFacts, expert: LanguageModel, own: Interfaces
) -> Iterator[Interface]:
    """Yield the interfaces of a policy's action expert, and of the graph of its modulation."""
    lm = manifest.language_model
    embedding = TensorSpec("time_embedding", "float32", (1, 1, expert.hidden_size))
    # The scale, the shift and the gate of each of the expert's norms: two a layer, and the last.
    rows = 3 * (2 * expert.num_layers + 1)
    modulation = [own.floats("modulation", 1, rows, expert.hidden_size)]
    actions = (1, policy.chunk, policy.action_dim)
    takes = [own.floats(table, 1, policy.expert_rows, lm.head_dim // 2) for table in ("cos", "sin")]
    takes.append(TensorSpec("actions", "float32", actions))
    if not policy.state_in_prompt:
        takes.append(TensorSpec("state", "float32", (1, 1, policy.state_dim)))
    takes += [embedding, *(modulation if manifest.modulates else [])]
    takes.append(TensorSpec("step", "float32", (1,)))
    if policy.most_held:
        held = own.floats("modulation_held", 1, rows, expert.hidden_size)
        takes += [held, TensorSpec("held", "int64", (1,))]
    for segment, layers in enumerate(manifest.segments):
        takes.append(TensorSpec(f"length_{segment}", "int64", (1,)))
        for name in (f"past_{kind}_{layer}" for layer in layers for kind in ("key", "value")):
            takes.append(own.heads(name, lm.num_kv_heads))
    yield EXPERT, takes, [TensorSpec(name, "float32", actions) for name in ("actions_out", "velocity")]
    if manifest.modulates:
        yield MODULATION, [embedding], modulation
