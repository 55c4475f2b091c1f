"""The losses of the robot's training for what the visual tokens are and which of them the instruction names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, normalize, smooth_l1_loss
from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

from pocket_training.robot.batches import Batch
from pocket_training.robot.model import CAMERAS
from sinkprune.demo.scenes import COLOURS, SHAPES

_TOLD_FROM = 2
"""The first layer of the prefix (0-based) whose output marks the target."""


class Probe(nn.Module):
    """Predicts what patches show and where the target is. The checkpoint does not contain it."""

    def __init__(self, tower_width: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.patch = nn.Linear(tower_width, len(SHAPES) + len(COLOURS) + 4)
        layers = num_layers - _TOLD_FROM
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.named = nn.ModuleList(nn.Linear(width, 1) for _ in range(layers))
        self.goal = nn.ModuleList(nn.Linear(width, 2) for _ in range(layers))


class Seen(NamedTuple):
    """The tower's view of B moments, with V visual tokens a camera."""

    tower: torch.Tensor
    """[B,2,V,D]: the tower's output."""
    visual: torch.Tensor
    """[B,2,V,d]: visual tokens."""
    summary: torch.Tensor | None = None
    """[2B,36]: scores of the pairs of colour and shape that each picture shows, of a tower with CLS."""


class Prefix(NamedTuple):
    """The prefix of B prompts with V visual tokens a camera and T tokens of text."""

    layers: tuple[torch.Tensor, ...]
    """[B,2V+T,d] before the first layer and after each."""
    places: torch.Tensor
    """[B,2V+T] int64: the position of each row."""
    actions: Any
    """What the actions are made from."""


def patch_loss(probe: Probe, seen: Seen, batch: Batch) -> torch.Tensor:
    """Return the loss of what each patch shows, from the tower's output; scalar."""
    shape, colour, place = probe.patch(seen.tower).split([len(SHAPES) + 1, len(COLOURS) + 1, 2], -1)
    there = batch.classes[..., 0] > 0
    found = cross_entropy(shape.flatten(0, 2), batch.classes[..., 0].flatten())
    coloured = cross_entropy(colour[there], batch.classes[there][:, 1])
    return found + coloured + smooth_l1_loss(place[there], batch.centres[there])


def summary_loss(summary: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the loss of the scores `summary` [2B,36] for what each picture shows; scalar."""
    shape, colour = batch.classes[..., 0].flatten(0, 1), batch.classes[..., 1].flatten(0, 1)
    pair = ((colour - 1) * len(SHAPES) + shape) * (shape > 0)
    shown = torch.zeros(len(pair), len(COLOURS) * len(SHAPES) + 1).scatter(1, pair, 1.0)
    return 4 * binary_cross_entropy_with_logits(summary, shown[:, 1:])


def naming_loss(words: torch.Tensor, seen: Seen, batch: Batch, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the distance of visual tokens from the `words` [N,d] for what they show; scalar."""
    table = normalize(words, dim=-1)
    visual = normalize(seen.visual, dim=-1) * seen.visual.shape[-1] ** 0.5
    total = visual.new_zeros(())
    for i, names in enumerate((SHAPES, tuple(COLOURS))):
        ids = [tokenizer.token_to_id(f"Ġ{name}") for name in names]
        there = batch.classes[..., i] > 0
        total = total + cross_entropy(visual[there] @ table[ids].T, batch.classes[there][:, i] - 1)
    return total


def pointing_loss(probe: Probe, prefix: Prefix, batch: Batch) -> torch.Tensor:
    """Return the loss of which objects' tokens show the target, and where the last word's row places it; scalar."""
    visual = CAMERAS * batch.patches.shape[-1]
    there, target = batch.classes[..., 0].flatten(1) > 0, batch.classes[..., 2].flatten(1).float()
    total = prefix.layers[0].new_zeros(())
    for norm, named, goal, rows in zip(
        probe.norms, probe.named, probe.goal, prefix.layers[_TOLD_FROM + 1 :], strict=True
    ):
        states = norm(rows)
        marked = named(states[:, :visual])[..., 0]
        total = total + binary_cross_entropy_with_logits(marked[there], target[there])
        total = total + 4 * smooth_l1_loss(goal(states[:, -1]), batch.goal, beta=0.1)
    return total / len(probe.norms)


def looking_loss(decoder: Any, prefix: Prefix, batch: Batch) -> torch.Tensor:
    """Return the mean -log of the attention that words pay to the visual tokens that they name; scalar.

    In layer 1 the colour looks at objects of that colour, and the shape at objects of that shape. In layers 2 to 5
    the shape and the line's end look at the target. Only the first half of the heads is taught. Without this loss a
    decoder of this size learns what the instruction names much later.
    """
    shape, colour, target = (values.flatten(1) for values in batch.classes.unbind(-1))
    first = target.argmax(1, keepdim=True)
    alone = torch.stack([colour == colour.gather(1, first), shape == shape.gather(1, first)], 1)
    together = (target == 1)[:, None].expand(-1, 2, -1)
    taught = [(1, slice(-3, -1), alone), *((layer, slice(-2, None), together) for layer in (2, 3, 4, 5))]
    losses = [_distance(decoder, prefix, *lesson) for lesson in taught]
    return torch.stack(losses).mean()


def _distance(decoder: Any, prefix: Prefix, layer: int, words: slice, wanted: torch.Tensor) -> torch.Tensor:
    """Return the loss of the rows `words` of B prompts in a layer, which shall look at `wanted` [B,n,2V]; scalar."""
    block, rows = decoder.layers[layer], prefix.layers[layer]
    attention, normed = block.self_attn, block.input_layernorm(rows)
    rope = decoder.rotary_emb(rows, position_ids=prefix.places)
    queries, keys = (
        project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj)
    )
    queries, keys = apply_rotary_pos_emb(queries, keys, *rope)
    taught = queries[:, : queries.shape[1] // 2, words]
    share = (taught @ keys.transpose(-1, -2) * attention.head_dim**-0.5).log_softmax(-1)
    return -share[..., : wanted.shape[-1]].masked_fill(~wanted[:, None], -torch.inf).logsumexp(-1).mean()
