"""The training's pi0: its prefix, flow matching, and chunks in closed loops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import mse_loss

from pocket_training.robot.batches import Batch, Form, instruction_ids, normalised, statistics
from pocket_training.robot.losses import Prefix, Seen
from pocket_training.robot.model import ACTION, CAMERAS, CHUNK, GRID, IMAGE, new_model, new_tokenizer, save
from pocket_training.robot.robot import Robot
from pocket_training.stages import ROBOT_STAGES
from sinkprune.demo.robot_table import RobotTable

_DRAWS = 6
"""Times and noises of the action chunk for each prefix."""


class Pi0Robot(Robot):
    """A pi0 of 3 million parameters."""

    stages = ROBOT_STAGES
    imitation, own_losses = "flow", ("flow",)

    def __init__(self) -> None:
        self.model, self.tokenizer = new_model(), new_tokenizer()
        self.form = Form(normalised, partial(instruction_ids, tokenizer=self.tokenizer), statistics())
        self.tower_width, self.decoder = (
            self.model.config.vlm_config.vision_config.hidden_size,
            self.model.model.vlm.language_model,
        )

    def see(self, batch: Batch) -> Seen:
        return run_tower(self.model, batch)

    def read(self, seen: Seen, batch: Batch) -> Prefix:
        return run_prefix(self.model, seen, batch)

    def imitate(self, prefix: Prefix, batch: Batch) -> torch.Tensor:
        return flow_loss(self.model, prefix, batch, _DRAWS)

    def act(self, tables: Sequence[RobotTable], instructions: Sequence[str], seed: int) -> NDArray[np.float32]:
        images = [IMAGE] * (CAMERAS * GRID**2)
        ids = torch.tensor([images + self.form.ids(instruction) for instruction in instructions])
        pixels, states = self.observed(tables)
        actions = self.model.sample_actions(
            state=states,
            input_ids=ids,
            pixel_values=pixels,
            noise=torch.randn(len(tables), CHUNK, ACTION, generator=torch.Generator().manual_seed(seed)),
            attention_mask=torch.ones_like(ids),
            pixel_attention_mask=torch.ones(len(tables), CAMERAS, dtype=torch.bool),
        )
        return self.in_robots_units(actions)

    def save(self, folder: Path) -> None:
        save(self.model, self.tokenizer, self.form.statistics, folder)


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
        cache=prefix.actions,
        use_cache=True,
    ).last_hidden_state
    velocity = model.action_out_proj(out[:, 1:]).unflatten(1, (draws, CHUNK))
    return mse_loss(velocity, noise - actions)
