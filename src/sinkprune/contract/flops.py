"""The FLOPs of decoders, policies and Qwen's towers, and the bytes that a decode step reads.

FLOPs are those of matrix products. `sinkprune.contract.schedule` has those of towers whose tokens may be merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sinkprune.contract.manifest import LanguageModel, Manifest, QwenTower

if TYPE_CHECKING:
    from sinkprune.contract.policy_facts import PolicyFacts


def layer_flops(model: LanguageModel, tokens: int) -> int:
    """Return the FLOPs of one decoder layer on `tokens` tokens: projections, full n x n attention, gated MLP."""
    d, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    q = model.num_heads * model.head_dim
    projections = 2 * tokens * d * q + 2 * tokens * d * kv
    attention = 2 * tokens**2 * q
    mlp = 3 * tokens * d * model.intermediate_size
    return 2 * (projections + attention + mlp)


def policy_flops(
    manifest: Manifest, tokens_per_layer: Sequence[int], new_tokens: int | None = None
) -> tuple[int, int]:
    """Return the FLOPs of a policy's prompt, and of one denoising step, of the action head or of all new tokens.

    `new_tokens` are those of a chunk; None means the most.
    """
    model, policy = manifest.language_model, manifest.acting
    if policy.expert is not None:
        return prefix_flops(model, tokens_per_layer), expert_flops(policy, tokens_per_layer)
    step = head_flops(policy, model.hidden_size)
    if manifest.decodes:
        count = policy.new_tokens if new_tokens is None else new_tokens
        pairs = sum(tokens_per_layer) * 2 * 2 * model.num_heads * model.head_dim
        step = count * 2 * model.hidden_size * model.vocab_size
        # The prompt gives the first token.
        step += (count - 1) * (model.num_layers * layer_flops(model, 1) + pairs)
    return prefill_flops(model, tokens_per_layer), step


def prefix_flops(model: LanguageModel, tokens_per_layer: Sequence[int]) -> int:
    """Return the FLOPs of a policy's prefix: of its last layer only keys and values are computed."""
    *earlier, last = tokens_per_layer
    return prefill_flops(model, earlier) + 2 * 2 * last * model.hidden_size * model.num_kv_heads * model.head_dim


def prefill_flops(model: LanguageModel, tokens_per_layer: Sequence[int]) -> int:
    """Return the FLOPs of a prefill in which layer i runs on `tokens_per_layer[i]` tokens (visual and text)."""
    return sum(layer_flops(model, tokens) for tokens in tokens_per_layer)


def qwen_tower_flops(tower: QwenTower, patches: int, pairs: int, *, mlp_matrices: int, mergers: int) -> int:
    """Return the FLOPs of a Qwen tower on `patches` patches: patch embedding, blocks and mergers.

    `pairs` are the pairs of patches that attend to each other, summed over blocks. A block's MLP has `mlp_matrices`
    matrices. `mergers` are the tower's own and those of DeepStack.
    """
    d, m = tower.hidden_size, tower.intermediate_size
    embedding = patches * 3 * tower.temporal_patch_size * tower.patch_size**2 * d
    linear = patches * (4 * d * d + mlp_matrices * d * m)
    joined = d * tower.merge_size**2
    merger = patches // tower.merge_size**2 * (joined**2 + joined * tower.out_size)
    return 2 * (embedding + tower.num_blocks * linear + 2 * pairs * d + mergers * merger)


def head_flops(policy: PolicyFacts, width: int) -> int:
    """Return the FLOPs of the action head on rows of a decoder's `width`, and of the row that has the state."""
    blocks, dim = policy.rows.head_blocks if policy.rows else 0, policy.action_dim
    state = policy.state_dim * width + width**2 if policy.state_dim else 0
    return 2 * (policy.chunk * ((dim + blocks) * width**2 + dim * width) + state)


def expert_flops(policy: PolicyFacts, prefix_rows: Sequence[int]) -> int:
    """Return the FLOPs of one denoising step of a policy's expert, over `prefix_rows[i]` cached rows of layer i.

    Without what depends on the time alone (pi0.5's norms), which runs once for each time.
    """
    expert, rows = policy.denoiser, policy.expert_rows
    width, q = expert.hidden_size, expert.num_heads * expert.head_dim
    own = sum(layer_flops(expert, rows) + 2 * 2 * rows * cached * q for cached in prefix_rows)
    ends = policy.chunk * 2 * policy.action_dim * width
    if not policy.state_in_prompt:
        ends += policy.chunk * 3 * width**2 + policy.state_dim * width
    return own + 2 * ends


def decode_bytes(manifest: Manifest, kv_bytes: int) -> int:
    """Return the bytes that a decode step reads: the stored weights of decoder and head, and the KV cache."""
    graphs = ["head", *(f"decoder_{segment}" for segment in range(len(manifest.segments)))]
    return sum(manifest.weight_bytes(graph) for graph in graphs) + kv_bytes
