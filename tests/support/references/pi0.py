"""pi0 in transformers: its own chunks, and chunks with dropped tokens masked instead of removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, PI0ForConditionalGeneration
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD

from support.references import masking

Array = np.ndarray[Any, Any]
INSTRUCTION = "pick up the red cup"


def frames(photo: Image.Image, cameras: int = 3) -> list[Image.Image]:
    """Different parts of a photo, of odd sizes: wide, high and square."""
    boxes = [(0, 0, 301, 167), (200, 20, 333, 399), (300, 100, 501, 301)]
    return [photo.crop(box) for box in boxes[:cameras]]


class PI0ImageProcessorPil(PilBackend):  # type: ignore[misc]
    """PI0ImageProcessor, which needs torchvision, with transformers' own code for Pillow."""

    resample = 3
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    default_to_square = False
    do_resize = True
    do_rescale = True
    do_normalize = True
    do_convert_rgb = True
    do_pad = True


@dataclass
class Pi0Reference:
    """A checkpoint in transformers."""

    folder: Path
    model: Any = field(init=False)
    tokenizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = PI0ForConditionalGeneration.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    @property
    def side(self) -> int:
        """Pixels along a side of the tower's picture."""
        return self.model.config.vlm_config.vision_config.image_size

    def pixels(self, frames: Sequence[Image.Image]) -> torch.Tensor:
        """[cameras,3,side,side]."""
        sizes = {"size": {"max_height": self.side, "max_width": self.side}}
        sizes["pad_size"] = {"height": self.side, "width": self.side}
        found = PI0ImageProcessorPil(**sizes)(list(frames), return_tensors="pt")["pixel_values"]
        return torch.as_tensor(found)

    def ids(self, cameras: int, instruction: str = INSTRUCTION) -> list[int]:
        """The prompt's tokens, as PI0Processor writes them."""
        tokens = (self.side // 14) ** 2 * cameras
        text = f"{'<image>' * tokens}{self.tokenizer.bos_token}{instruction}\n"
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def prefix_cache(self, frames: Sequence[Image.Image]) -> list[tuple[Array, Array]]:
        """Keys and values [1,Hkv,S,h] of the unpruned prefix, by layer."""
        model, ids = self.model.model, torch.tensor([self.ids(len(frames))])
        there = torch.ones(1, len(frames), dtype=torch.bool)
        rows = model.embed_prefix(ids, self.pixels(frames)[None].float(), there)
        types = torch.zeros_like(rows)[:, :, 0]
        positions = torch.arange(rows.shape[1])[None]
        cache = model.vlm(inputs_embeds=rows, position_ids=positions, token_type_ids=types, use_cache=True).cache
        return [(layer.keys.numpy(), layer.values.numpy()) for layer in cache.layers]

    @torch.no_grad()
    def tower(self, frames: Sequence[Image.Image]) -> list[tuple[Array, Array, Array]]:
        """Tokens [N,D], norms and salience [N] of each picture."""
        tower = self.model.model.vlm.vision_tower
        tower.set_attn_implementation("eager")
        found = tower(self.pixels(frames).float(), output_attentions=True, output_hidden_states=True)
        before_norm = tower.encoder(tower.embeddings(self.pixels(frames).float())).last_hidden_state
        salience = found.attentions[-2].mean(dim=(1, 2))
        norms = before_norm.norm(dim=-1)
        return [(t.numpy(), n.numpy(), s.numpy()) for t, n, s in zip(found[0], norms, salience, strict=True)]

    @torch.no_grad()
    def unpruned(
        self, frames: Sequence[Image.Image | None], state: Array, noise: Array, steps: int, padding: int = 7
    ) -> Array:
        """[chunk,action_dim] of `sample_actions`, with padding behind the prompt as PI0Processor adds it."""
        there = torch.tensor([[frame is not None for frame in frames]])
        pixels = torch.zeros(1, len(frames), 3, self.side, self.side)
        pixels[there] = self.pixels([frame for frame in frames if frame is not None]).float()
        ids = self.ids(int(there.sum()))
        actions = self.model.sample_actions(
            state=torch.from_numpy(state)[0],
            input_ids=torch.tensor([ids + [0] * padding]),
            attention_mask=torch.tensor([[1] * len(ids) + [0] * padding]),
            pixel_values=pixels,
            pixel_attention_mask=there,
            noise=torch.from_numpy(noise),
            num_steps=steps,
        )
        return actions[0].numpy()


def sanitized_rows(
    reference: Pi0Reference, towers: masking.Towers, budget: str
) -> tuple[masking.Sequence, list[list[int]]]:
    """The prefix with the rows that the reference's sanitizer leaves of `towers`, and their tokens by camera."""
    return masking.policy_prompt(reference.model.model.vlm, towers, reference.ids(0), "pi0", budget)


def masked_prefix(
    reference: Pi0Reference, prefix: masking.Sequence, budget: str, stages: Mapping[int, int | list[int]]
) -> masking.Masked:
    """Every row of the prefix through every layer, as `masked_layers` does it."""
    return masking.masked_layers(reference.model.model.vlm.language_model, prefix, budget, stages)


@torch.no_grad()
def masked_chunk(
    reference: Pi0Reference, prefix: masking.Masked, position: int, state: Array, noise: Array, steps: int
) -> Array:
    """[chunk,action_dim] of the expert, which sees in each layer the rows that the prefix's layer sees."""
    model, expert = reference.model, reference.model.model.dit
    size, rows = len(prefix.visible[0]), noise.shape[1] + 1
    actions = torch.from_numpy(noise)
    own = torch.ones(rows, rows, dtype=torch.bool)
    own[0, 1:] = False
    masks = [
        torch.zeros(1, 1, rows, size + rows).masked_fill(
            ~torch.cat([seen.expand(rows, -1), own], dim=1), torch.finfo(torch.float32).min
        )
        for seen in prefix.visible
    ]
    positions = torch.arange(position, position + rows)[None]
    for step in range(steps):
        time = torch.full((1,), 1.0 - step / steps)
        hidden = model.embed_action_time(torch.from_numpy(state)[0], actions, time)
        tables = expert.rotary_emb(hidden, position_ids=positions)
        for layer, mask in zip(expert.layers, masks, strict=True):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=tables, cache=prefix.cache)
        prefix.cache.crop(-rows)
        velocity = model.action_out_proj(expert.norm(hidden)[:, 1:])
        actions = actions - velocity / steps
    return actions[0].numpy()
