"""OpenVLA-OFT in plain torch, from its description: slow, one picture after the other, around transformers' Llama.

Written from moojink/openvla-oft (prismatic/extern/hf/modeling_prismatic.py, prismatic/models), which is compared with
it outside this repository (docs/openvla.md). Dropped tokens are masked, and never removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaModel

from sinkprune.contract.budgets import parse_budget
from support.models.openvla_checkpoints import EMPTY, STOP, TOWER_DEPTH, TOWER_HEADS
from support.references import masking
from support.references.masking import Towers, camera_rows

Array = np.ndarray[Any, Any]
INSTRUCTION = "Pick up the  red cup."


@dataclass
class Rows(masking.Sequence):
    """A prompt before the first layer."""

    actions: list[int] = field(default_factory=list)
    """The rows that become actions."""
    sources: list[list[int]] = field(default_factory=list)
    """The tokens of the visual rows, by camera."""

    @property
    def values(self) -> Array:
        """[S,d]."""
        return self.rows


class OpenVlaReference:
    """A checkpoint, read without the code under test."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
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
        self.decoder = LlamaModel(LlamaConfig(**self.config["text_config"])).eval()
        llm = "language_model.model."
        self.decoder.load_state_dict(
            {name.removeprefix(llm): value for name, value in self.tensors.items() if name.startswith(llm)}
        )

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
        rows = F.conv2d(pixels[None], kernel, bias, patch).flatten(2)[0].T
        x = rows + weights[f"{name}.pos_embed"][0]
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
        towers: Towers,
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
        options = parse_budget("openvla-oft", budget) if budget else None
        seen, positions, cameras, sources = camera_rows(towers, options, self.projected, chosen, first=1)
        rows, positions = [table[ids[0]], *seen], [0, *positions]
        tail = []
        if state is not None:
            projected = F.gelu(self.linear("proprio_projector.fc1", torch.from_numpy(state).float()))
            tail.append(self.linear("proprio_projector.fc2", projected))
        text = [*range(len(rows) + len(tail), len(rows) + len(tail) + len(ids) - 1)]
        tail += [*table[ids[1:]]]
        if self.has_head:
            tail += [*[torch.zeros(table.shape[1])] * placeholders, table[STOP]]
        first = 1 + len(towers) * len(towers[0][0])
        positions += [*range(first, first + len(tail))]
        return Rows(
            torch.stack([*rows, *tail]).numpy(),
            [row for camera in cameras for row in camera],
            text,
            np.array(positions),
            "openvla-oft",
            images=cameras,
            both_ways=self.has_head,
            actions=[text[-1] + place for place in range(placeholders)],
            sources=sources,
        )

    def run(
        self,
        rows: Rows,
        budget: str | None = None,
        stages: Mapping[int, list[int]] | None = None,
        *rules: Any,
        **rule: Any,
    ) -> masking.Masked:
        """All rows through all layers. After a layer of `stages` so many visual rows of each camera stay visible.

        `rules` are `asking` and `choose` of `masking.masked_layers`.
        """
        by_actions = budget is not None and parse_budget("openvla-oft", budget).queries
        asked = replace(rows, text=rows.actions) if by_actions else rows
        return masking.masked_layers(self.decoder, asked, budget or "prune-80", stages or {}, None, *rules, **rule)

    @torch.no_grad()
    def actions(self, hidden: torch.Tensor, chunk: int, dim: int) -> Array:
        """[chunk,dim] of the head. The rows read begin with the lone space, one before the placeholders."""
        rows = self.decoder.norm(hidden)[0, -2 - chunk * dim : -2]
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
    def token_actions(self, rows: Rows, numbers: int, first: masking.Masked) -> tuple[list[int], Array]:
        """Greedy tokens after the run `first`, and the numbers [1,numbers] that they are.

        In each layer they see the rows that the last row of the prompt sees there, and each other.
        """
        tokens: list[int] = []
        x, end = first.hidden[:, -1:], int(rows.positions.max()) + 1
        while True:
            tokens.append(int(self.linear("language_model.lm_head", self.decoder.norm(x)).argmax()))
            if len(tokens) == numbers:
                break
            x = self.decoder.embed_tokens(torch.tensor([tokens[-1:]]))
            tables = self.decoder.rotary_emb(x, position_ids=torch.tensor([[end + len(tokens) - 1]]))
            for layer, seen in zip(self.decoder.layers, first.visible, strict=True):
                visible = torch.cat([seen, torch.ones(len(tokens), dtype=torch.bool)])
                mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
                x = layer(x, attention_mask=mask[None, None, None], position_embeddings=tables, cache=first.cache)
        edges = np.linspace(-1, 1, 256)
        places = [min(max(32000 - token - 1, 0), 254) for token in tokens]
        return tokens, np.array([[(edges[place] + edges[place + 1]) / 2 for place in places]])
