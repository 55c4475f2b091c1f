"""OpenVLA-OFT in plain torch, from its description: slow, one picture and one row after the other.

Written from moojink/openvla-oft (prismatic/extern/hf/modeling_prismatic.py, prismatic/models), which is compared with
it outside this repository (docs/openvla.md). Dropped tokens are masked, and never removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sinkprune.contract.budgets import parse_budget
from support.models.openvla_checkpoints import EMPTY, STOP, TOWER_DEPTH, TOWER_HEADS
from support.references.masking import Asking, Choose, best_rows, every_text_row, surviving
from support.references.reference import sanitize_at

Array = np.ndarray[Any, Any]
INSTRUCTION = "Pick up the  red cup."


@dataclass
class Rows:
    """A prompt before the first layer: rows [S,d] and their positions [S]."""

    values: torch.Tensor
    positions: list[int]
    cameras: list[list[int]]
    """The visual rows of each camera."""
    text: list[int]
    """The rows of the prompt's text after the pictures."""
    actions: list[int]
    """The rows that become actions."""
    sources: list[list[int]]
    """The tokens of the visual rows, by camera."""


@dataclass
class Masked:
    """A run of all layers."""

    hidden: torch.Tensor
    """[S,d] after the last layer."""
    visible: list[torch.Tensor] = field(default_factory=list)
    """[S] bool: the rows that each layer sees."""
    survivors: dict[int, list[int]] = field(default_factory=dict)


class OpenVlaReference:
    """A checkpoint, read without the code under test."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.text = self.config["text_config"]
        self.tensors: dict[str, torch.Tensor] = {}
        for shard in folder.glob("*.safetensors"):
            self.tensors |= load_file(shard)
        for file in folder.glob("*_checkpoint.pt"):
            part = file.name.partition("--")[0]
            own = torch.load(file, weights_only=True)
            self.tensors |= {f"{part}.{name.removeprefix('module.')}": value for name, value in own.items()}
        self.tensors = {name: value.float() for name, value in self.tensors.items()}
        self.processor = json.loads((folder / "preprocessor_config.json").read_text())
        self.statistics = json.loads((folder / "dataset_statistics.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.has_head = "action_head.model.fc1.weight" in self.tensors

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def layer_norm(self, name: str, x: torch.Tensor, epsilon: float) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], epsilon)

    def pixels(self, frame: Image.Image) -> list[torch.Tensor]:
        """[3,side,side] of each tower: stretched, and normalised by the rounded numbers of the file."""
        side = self.config["image_sizes"][0]
        levels = np.asarray(frame.resize((side, side), Image.Resampling.BICUBIC)).astype(np.float32) / 255
        return [
            torch.from_numpy((levels - np.float32(one["mean"])) / np.float32(one["std"])).permute(2, 0, 1)
            for one in self.processor["tvf_normalize_params"]
        ]

    def tower(self, name: str, pixels: torch.Tensor, patch: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [R,D] before the last block, and the attention [H,R,R] of the block that made them."""
        weights = self.tensors
        kernel, bias = (weights[f"{name}.patch_embed.proj.{kind}"] for kind in ("weight", "bias"))
        rows = []
        for top in range(0, pixels.shape[1], patch):
            for left in range(0, pixels.shape[2], patch):
                square = pixels[:, top : top + patch, left : left + patch]
                rows.append((kernel * square).sum(dim=(1, 2, 3)) + bias)
        x = torch.stack(rows) + weights[f"{name}.pos_embed"][0]
        before = [
            weights[f"{name}.{token}"][0] for token in ("cls_token", "reg_token") if f"{name}.{token}" in weights
        ]
        x = torch.cat([*before, x])
        shares = torch.empty(0)
        for number in range(TOWER_DEPTH - 1):
            block = f"{name}.blocks.{number}"
            qkv = self.linear(f"{block}.attn.qkv", self.layer_norm(f"{block}.norm1", x, 1e-6))
            query, key, value = (
                part.reshape(len(x), TOWER_HEADS, -1).transpose(0, 1) for part in qkv.chunk(3, dim=1)
            )
            shares = torch.softmax(query @ key.transpose(1, 2) / query.shape[2] ** 0.5, dim=2)
            mixed = (shares @ value).transpose(0, 1).reshape(len(x), -1)
            x = x + self.scaled(f"{block}.ls1", self.linear(f"{block}.attn.proj", mixed))
            inner = F.gelu(self.linear(f"{block}.mlp.fc1", self.layer_norm(f"{block}.norm2", x, 1e-6)))
            x = x + self.scaled(f"{block}.ls2", self.linear(f"{block}.mlp.fc2", inner))
        return x, shares

    def scaled(self, name: str, x: torch.Tensor) -> torch.Tensor:
        factor = self.tensors.get(f"{name}.scale_factor")
        return x if factor is None else x * factor

    @torch.no_grad()
    def towers(self, frames: Sequence[Image.Image]) -> list[tuple[Array, Array, Array]]:
        """Tokens [N,D] of both towers, DINOv2's first, their norms and the attention of DINOv2's CLS row."""
        found = []
        for frame in frames:
            first, second = self.pixels(frame)
            dino, shares = self.tower("vision_backbone.featurizer", first)
            siglip, _ = self.tower("vision_backbone.fused_featurizer", second)
            special = len(dino) - len(siglip)
            tokens = torch.cat([dino[special:], siglip], dim=1)
            salience = shares[:, 0, special:].mean(dim=0)
            found.append((tokens.numpy(), tokens.norm(dim=1).numpy(), salience.numpy()))
        return found

    def projected(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.linear("projector.fc1", tokens))
        return self.linear("projector.fc3", F.gelu(self.linear("projector.fc2", x)))

    def ids(self, instruction: str) -> list[int]:
        """The tokens of the prompt, with the lone space that the training has at its end."""
        prompt = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
        found: list[int] = self.tokenizer.encode(prompt).ids
        return found if found[-1] == EMPTY else [*found, EMPTY]

    def normalised_state(self, state: Sequence[float], data_set: str, ends: tuple[str, str]) -> Array:
        own = self.statistics[data_set]["proprio"]
        low, high = (np.array(own[end]) for end in ends)
        return np.clip(2 * (np.array(state) - low) / (high - low + 1e-8) - 1, -1, 1)

    def in_robots_units(self, actions: Array, data_set: str, ends: tuple[str, str]) -> Array:
        own = self.statistics[data_set]["action"]
        low, high = (np.array(own[end]) for end in ends)
        return np.where(own["mask"], 0.5 * (actions + 1) * (high - low + 1e-8) + low, actions)

    @torch.no_grad()
    def rows(
        self,
        towers: Sequence[tuple[Array, Array, Array]],
        instruction: str,
        state: Array | None,
        placeholders: int,
        budget: str | None = None,
        chosen: Sequence[tuple[Array, list[int]]] | None = None,
    ) -> Rows:
        """BOS, the pictures, the state, the text, a row of zeros for each number of the chunk, and the stop token.

        With a `budget` its sanitizer leaves out tokens, and all others keep their positions. `chosen` are the tokens
        of each camera that another method keeps, and their places.
        """
        table, ids = self.tensors["language_model.model.embed_tokens.weight"], self.ids(instruction)
        rows, positions, cameras, sources = [table[ids[0]]], [0], [], []
        count = len(towers[0][0])
        for number, (tokens, norms, salience) in enumerate(towers):
            if chosen is not None:
                kept, index = chosen[number]
            elif budget:
                kept, index = sanitize_at(parse_budget("openvla-oft", budget), tokens, norms, salience)
            else:
                kept, index = tokens, [*range(count)]
            cameras.append([*range(len(rows), len(rows) + len(index))])
            rows += [*self.projected(torch.from_numpy(kept))]
            positions += [1 + number * count + token for token in index]
            sources.append(index)
        tail = []
        if state is not None:
            projected = F.gelu(self.linear("proprio_projector.fc1", torch.from_numpy(state).float()))
            tail.append(self.linear("proprio_projector.fc2", projected))
        text = [*range(len(rows) + len(tail), len(rows) + len(tail) + len(ids) - 1)]
        tail += [*table[ids[1:]]]
        if self.has_head:
            tail += [*[torch.zeros(table.shape[1])] * placeholders, table[STOP]]
        first = 1 + len(towers) * count
        positions += [*range(first, first + len(tail))]
        actions = [text[-1] + place for place in range(placeholders)]
        return Rows(torch.stack([*rows, *tail]), positions, cameras, text, actions, sources)

    def rms_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        # transformers' default, because the configuration names none.
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt() * self.tensors[f"{name}.weight"]

    def layer(
        self, number: int, x: torch.Tensor, positions: Sequence[int], visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows after a layer, and its rotated queries and keys.

        Every row sees all `visible` rows; without an action head, only those up to its own.
        """
        seen = visible.expand(len(x), -1) if self.has_head else visible & torch.ones(len(x), len(x)).tril().bool()
        name, heads = f"language_model.model.layers.{number}", self.text["num_attention_heads"]
        normed = self.rms_norm(f"{name}.input_layernorm", x)
        query, key, value = (
            self.linear(f"{name}.self_attn.{part}_proj", normed)
            .reshape(len(x), -1, x.shape[1] // heads)
            .transpose(0, 1)
            for part in "qkv"
        )
        query, key = rotated(query, positions), rotated(key, positions)
        repeats = heads // len(key)
        scores = query @ key.repeat_interleave(repeats, dim=0).transpose(1, 2) / query.shape[2] ** 0.5
        shares = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=2)
        mixed = (shares @ value.repeat_interleave(repeats, dim=0)).transpose(0, 1).reshape(len(x), -1)
        x = x + self.linear(f"{name}.self_attn.o_proj", mixed)
        normed = self.rms_norm(f"{name}.post_attention_layernorm", x)
        inner = F.silu(self.linear(f"{name}.mlp.gate_proj", normed)) * self.linear(f"{name}.mlp.up_proj", normed)
        return x + self.linear(f"{name}.mlp.down_proj", inner), query, key

    @torch.no_grad()
    def run(
        self,
        rows: Rows,
        budget: str | None = None,
        stages: Mapping[int, Sequence[int]] | None = None,
        asking: Asking = every_text_row,
        choose: Choose = best_rows,
    ) -> Masked:
        """All rows through all layers. After a layer of `stages` so many visual rows of each camera stay visible.

        `asking` and `choose` are those of `masking.masked_forward`.
        """
        options = parse_budget("openvla-oft", budget) if budget else None
        visible, found = torch.ones(len(rows.values), dtype=torch.bool), Masked(rows.values)
        for number in range(self.text["num_hidden_layers"]):
            found.visible.append(visible.clone())
            found.hidden, query, key = self.layer(number, found.hidden, rows.positions, visible)
            if options is None or stages is None or number not in stages:
                continue
            found.survivors[number] = surviving(
                options,
                (query.numpy(), key.numpy(), found.hidden.numpy()),
                np.flatnonzero(visible).tolist(),
                rows.cameras,
                rows.actions if options.queries else rows.text,
                stages[number],
                causal=not self.has_head,
                asking=asking,
                choose=choose,
            )
            visible[:] = False
            visible[found.survivors[number]] = True
        return found

    @torch.no_grad()
    def actions(self, hidden: torch.Tensor, chunk: int, dim: int) -> Array:
        """[chunk,dim] of the head. The rows read begin with the lone space, one before the placeholders."""
        stop = len(hidden) - 1
        first = stop - chunk * dim - 1
        rows = self.rms_norm("language_model.model.norm", hidden[first : first + chunk * dim])
        steps, name = [], "action_head.model"
        for step in range(chunk):
            x = torch.cat([*rows[step * dim : (step + 1) * dim]])
            x = F.relu(self.linear(f"{name}.fc1", self.layer_norm(f"{name}.layer_norm1", x, 1e-5)))
            block = 0
            while f"{name}.mlp_resnet_blocks.{block}.ffn.1.weight" in self.tensors:
                own = f"{name}.mlp_resnet_blocks.{block}.ffn"
                x = x + F.relu(self.linear(f"{own}.1", self.layer_norm(f"{own}.0", x, 1e-5)))
                block += 1
            steps.append(self.linear(f"{name}.fc2", self.layer_norm(f"{name}.layer_norm2", x, 1e-5)))
        return torch.stack(steps).numpy()

    @torch.no_grad()
    def token_actions(self, rows: Rows, numbers: int, first: Masked) -> tuple[list[int], Array]:
        """Greedy tokens after the run `first`, and the numbers [1,numbers] that they are.

        The whole prompt runs again for each token.

        A pruned token is dropped by what the prompt's own run says: earlier rows do not see later ones.
        """
        tokens: list[int] = []
        table = self.tensors["language_model.model.embed_tokens.weight"]
        dropped = {
            cut: [row for row in range(len(rows.values)) if row not in left] for cut, left in first.survivors.items()
        }
        while len(tokens) < numbers:
            x = torch.cat([rows.values, table[tokens]])
            positions = [*rows.positions, *range(rows.positions[-1] + 1, rows.positions[-1] + 1 + len(tokens))]
            visible = torch.ones(len(x), dtype=torch.bool)
            for number in range(self.text["num_hidden_layers"]):
                x = self.layer(number, x, positions, visible)[0]
                visible[dropped.get(number, [])] = False
            normed = self.rms_norm("language_model.model.norm", x[-1])
            tokens.append(int(self.linear("language_model.lm_head", normed).argmax()))
        edges = np.linspace(-1, 1, 256)
        places = [min(max(32000 - token - 1, 0), 254) for token in tokens]
        return tokens, np.array([[(edges[place] + edges[place + 1]) / 2 for place in places]])


def rotated(x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """[H,S,h] with halves rotated by theta 10000."""
    half = x.shape[2] // 2
    angles = torch.tensor(positions)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
