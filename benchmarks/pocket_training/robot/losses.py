"""The losses of the robot's training: of the action chunk by flow matching, and of what the visual tokens are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, normalize, smooth_l1_loss
from transformers.cache_utils import DynamicCache
from transformers.models.gemma.modeling_gemma import apply_rotary_pos_emb

from pocket_training.robot.batches import Batch
from pocket_training.robot.model import CAMERAS, CHUNK, GRID
from sinkprune.demo.scenes import COLOURS, SHAPES

_TOLD_FROM = 2
"""The first layer of the prefix (0-based) whose output marks the target."""


class Probe(nn.Module):
    """Predicts what patches show and where the target is. The checkpoint does not contain it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        vlm = model.config.vlm_config
        self.patch = nn.Linear(vlm.vision_config.hidden_size, len(SHAPES) + len(COLOURS) + 4)
        layers = vlm.text_config.num_hidden_layers - _TOLD_FROM
        norms = (nn.RMSNorm(vlm.text_config.hidden_size) for _ in range(layers))
        self.norms = nn.ModuleList(norms)
        self.named = nn.ModuleList(nn.Linear(vlm.text_config.hidden_size, 1) for _ in range(layers))
        self.goal = nn.ModuleList(nn.Linear(vlm.text_config.hidden_size, 2) for _ in range(layers))


class Seen(NamedTuple):
    """The tower's view of B moments, with V visual tokens a camera."""

    tower: torch.Tensor
    """[B,2,V,D]: the tower's output."""
    visual: torch.Tensor
    """[B,2,V,d]: visual tokens."""


class Prefix(NamedTuple):
    """The prefix of B prompts with V visual tokens a camera and T tokens of text."""

    layers: tuple[torch.Tensor, ...]
    """[B,2V+T,d] before the first layer and after each."""
    places: torch.Tensor
    """[B,2V+T] int64: the position of each row."""
    cache: DynamicCache


def run_tower(model: Any, batch: Batch) -> Seen:
    """Run tower and projector on the patches of the batch."""
    vlm, shape = model.model.vlm, (*batch.patches.shape, -1)
    embedded = vlm.vision_tower.embeddings(batch.pixels.flatten(0, 1))
    kept = batch.patches.flatten(0, 1)[..., None].expand(-1, -1, embedded.shape[-1])
    states = vlm.vision_tower.encoder(inputs_embeds=embedded.gather(1, kept)).last_hidden_state
    states = vlm.vision_tower.post_layernorm(states)
    return Seen(states.view(shape), vlm.multi_modal_projector(states).view(shape))


def run_prefix(model: Any, seen: Seen, batch: Batch) -> Prefix:
    """Run the prefix. Its rows keep the positions that they have among all visual tokens."""
    vlm, count = model.model.vlm, len(batch.ids)
    words = vlm.get_input_embeddings()(batch.ids)
    rows = torch.cat([seen.visual.flatten(1, 2), words], 1)
    of_camera = torch.arange(CAMERAS)[:, None] * GRID**2
    of_text = torch.arange(words.shape[1]).expand(count, -1) + CAMERAS * GRID**2
    places = torch.cat([(batch.patches + of_camera).flatten(1), of_text], 1)
    out = vlm.language_model(
        inputs_embeds=rows,
        position_ids=places,
        attention_mask=torch.zeros(count, 1, rows.shape[1], rows.shape[1]),
        use_cache=True,
        output_hidden_states=True,
    )
    return Prefix(out.hidden_states, places, out.cache)


def flow_loss(model: Any, prefix: Prefix, batch: Batch, draws: int) -> torch.Tensor:
    """Return the loss of the predicted velocities, with `draws` times and noises for each prefix; scalar.

    The state is one row. The chunks of all draws are the next rows; each attends to the prefix, the state and itself.
    """
    config, count = model.config, len(batch.state)
    beta = torch.distributions.Beta(config.time_sampling_beta_alpha, config.time_sampling_beta_beta)
    time = beta.sample((count, draws)) * config.time_sampling_scale + config.time_sampling_offset
    noise = torch.randn(count, draws, CHUNK, config.max_action_dim)
    actions = batch.actions[:, None]
    noisy = time[..., None, None] * noise + (1 - time[..., None, None]) * actions
    state = batch.state[:, None].expand(-1, draws, -1).flatten(0, 1)
    embedded = model.embed_action_time(state, noisy.flatten(0, 1), time.flatten()).unflatten(0, (count, draws))
    rows = torch.cat([embedded[:, 0, :1], embedded[:, :, 1:].flatten(1, 2)], 1)
    before, length = prefix.layers[0].shape[1], rows.shape[1]
    chunk = torch.arange(length - 1) // CHUNK
    mask = torch.full((length, before + length), float("-inf"))
    mask[:, : before + 1] = 0
    mask[1:, before + 1 :][chunk[:, None] == chunk] = 0
    start = CAMERAS * GRID**2 + batch.ids.shape[1]
    places = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(CHUNK).repeat(draws)]) + start
    out = model.model.dit(
        inputs_embeds=rows,
        attention_mask=mask.expand(count, 1, -1, -1),
        position_ids=places.expand(count, -1),
        cache=prefix.cache,
        use_cache=True,
    ).last_hidden_state
    velocity = model.action_out_proj(out[:, 1:]).unflatten(1, (draws, CHUNK))
    return mse_loss(velocity, noise - actions)


def patch_loss(probe: Probe, seen: Seen, batch: Batch) -> torch.Tensor:
    """Return the loss of what each patch shows, from the tower's output; scalar."""
    shape, colour, place = probe.patch(seen.tower).split([len(SHAPES) + 1, len(COLOURS) + 1, 2], -1)
    there = batch.classes[..., 0] > 0
    found = cross_entropy(shape.flatten(0, 2), batch.classes[..., 0].flatten())
    coloured = cross_entropy(colour[there], batch.classes[there][:, 1])
    return found + coloured + smooth_l1_loss(place[there], batch.centres[there])


def naming_loss(model: Any, seen: Seen, batch: Batch, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the distance of visual tokens from the words for what they show; scalar."""
    table = normalize(model.get_input_embeddings().weight, dim=-1)
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


def looking_loss(model: Any, prefix: Prefix, batch: Batch) -> torch.Tensor:
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
    losses = [_distance(model.model.vlm.language_model, prefix, *lesson) for lesson in taught]
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
