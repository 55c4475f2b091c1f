"""Matmul FLOPs: of a decoder prefill, by the tokens of each layer (method.md section 5), and of vision towers."""

from __future__ import annotations

from collections.abc import Sequence

from sinkprune.contract.manifest import LanguageModel, Manifest, PolicyFacts
from sinkprune.contract.towers import QwenTower, SquareTower


def layer_flops(model: LanguageModel, tokens: int) -> int:
    """Return the FLOPs of one decoder layer on `tokens` tokens: projections, full n x n attention, gated MLP."""
    d, kv = model.hidden_size, model.num_kv_heads * model.head_dim
    q = model.num_heads * model.head_dim
    projections = 2 * tokens * d * q + 2 * tokens * d * kv
    attention = 2 * tokens**2 * q
    mlp = 3 * tokens * d * model.intermediate_size
    return 2 * (projections + attention + mlp)


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


def expert_flops(policy: PolicyFacts, prefix_rows: Sequence[int]) -> int:
    """Return the FLOPs of one denoising step of a policy's expert, over `prefix_rows[i]` cached rows of layer i.

    Without what depends on the time alone (pi0.5's norms), which runs once for each time.
    """
    expert, rows = policy.expert, policy.expert_rows
    width, q = expert.hidden_size, expert.num_heads * expert.head_dim
    own = sum(layer_flops(expert, rows) + 2 * 2 * rows * cached * q for cached in prefix_rows)
    ends = policy.chunk * 2 * policy.action_dim * width
    if not policy.state_in_prompt:
        ends += policy.chunk * 3 * width**2 + policy.state_dim * width
    return own + 2 * ends


def vit_flops(tower: SquareTower, rows: int) -> int:
    """Return the matmul FLOPs of patches and computed blocks of a transformer on one picture, in `rows` rows."""
    d, m = tower.hidden_size, tower.intermediate_size
    patches = 2 * tower.tokens * 3 * tower.patch_size**2 * d
    block = 2 * (4 * rows * d * d + 2 * rows * rows * d + 2 * rows * d * m)
    return patches + tower.num_blocks * block


def decode_bytes(manifest: Manifest, kv_bytes: int) -> int:
    """Return the bytes that a decode step reads: the stored weights of decoder and head, and the KV cache."""
    graphs = ["head", *(f"decoder_{segment}" for segment in range(len(manifest.segments)))]
    return sum(manifest.weight_bytes(graph) for graph in graphs) + kv_bytes
