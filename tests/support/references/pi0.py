"""pi0 in transformers: its own chunks, and chunks with dropped tokens masked instead of removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, DynamicCache, PI0ForConditionalGeneration
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD

from sinkprune.contract.budgets import parse_budget
from support.references.masking import queries_and_keys, surviving
from support.references.reference import sanitize_at

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
        side: int = self.model.config.vlm_config.vision_config.image_size
        return side

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
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

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
        found: Array = actions[0].numpy()
        return found


@dataclass
class MaskedPrefix:
    """The full prefix in torch, and which of its rows each layer sees."""

    cache: Any
    visible: list[torch.Tensor]
    """[S] bool, by layer."""
    survivors: dict[int, list[int]]
    """After each pruning layer: the rows that later layers see."""


@dataclass
class PrefixRows:
    """The rows of a prefix before the first layer."""

    rows: Array
    """[S,d]."""
    positions: Array
    """[S]."""
    cameras: list[list[int]]
    """The visual rows of each camera."""
    text: list[int]


@torch.no_grad()
def sanitized_rows(
    reference: Pi0Reference, towers: Sequence[tuple[Array, Array, Array]], budget: str
) -> tuple[PrefixRows, list[list[int]]]:
    """The rows that the reference's sanitizer leaves of `towers`: tokens [N,D], norms and salience of each camera.

    Also the token of each row, by camera.
    """
    model, options, count = reference.model.model.vlm, parse_budget("pi0", budget), len(towers[0][0])
    rows: list[Array] = []
    positions: list[int] = []
    cameras, sources = [], []
    for number, (tokens, norms, salience) in enumerate(towers):
        kept, index = sanitize_at(options, tokens, norms, salience)
        cameras.append([*range(len(rows), len(rows) + len(index))])
        rows += [*model.multi_modal_projector(torch.from_numpy(kept)).numpy()]
        positions += [number * count + token for token in index]
        sources.append(index)
    words = reference.ids(0)
    text = [*range(len(rows), len(rows) + len(words))]
    rows += [*model.language_model.embed_tokens(torch.tensor(words)).numpy()]
    positions += [len(towers) * count + place for place in range(len(words))]
    return PrefixRows(np.array(rows), np.array(positions), cameras, text), sources


@torch.no_grad()
def masked_prefix(
    reference: Pi0Reference, prefix: PrefixRows, budget: str, stages: Mapping[int, Sequence[int]]
) -> MaskedPrefix:
    """Every row through every layer; after a pruning layer the rows dropped there are masked as keys.

    `stages` are the visual rows to keep of each camera by pruning layer.
    """
    gemma, options = reference.model.model.vlm.language_model, parse_budget("pi0", budget)
    hidden, cache = torch.from_numpy(prefix.rows)[None], DynamicCache()
    visible, result = torch.ones(len(prefix.rows), dtype=torch.bool), MaskedPrefix(cache, [], {})
    tables = gemma.rotary_emb(hidden, position_ids=torch.from_numpy(prefix.positions)[None])
    for number, layer in enumerate(gemma.layers):
        result.visible.append(visible.clone())
        mask = torch.zeros(1, 1, len(visible), len(visible)).masked_fill(~visible, torch.finfo(torch.float32).min)
        before = hidden
        hidden = layer(hidden, attention_mask=mask, position_embeddings=tables, cache=cache)
        if number in stages:
            query, key = queries_and_keys(layer, before, tables)
            result.survivors[number] = surviving(
                options,
                (query, key, hidden[0].numpy()),
                np.flatnonzero(visible).tolist(),
                prefix.cameras,
                prefix.text,
                stages[number],
                causal=False,
            )
            visible[:] = False
            visible[result.survivors[number]] = True
    return result


@torch.no_grad()
def masked_chunk(
    reference: Pi0Reference, prefix: MaskedPrefix, position: int, state: Array, noise: Array, steps: int
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
    found: Array = actions[0].numpy()
    return found
