"""pi0.5 by its published description: the prefix of transformers' PaliGemma, and an expert in plain torch.

The expert is written from arXiv 2504.16054, openpi's models/pi0.py and LeRobot's policies/pi05, in fp64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from transformers import AutoTokenizer, PI0Config, PI0ForConditionalGeneration

from support.models.pi0_checkpoints import EXPERT
from support.references.pi0 import Pi0Reference

Array = np.ndarray[Any, Any]
_VLM = "paligemma_with_expert.paligemma.model."


def state_text(instruction: str, normalised: Sequence[float]) -> str:
    """The text of a prompt: 256 bins from -1 to 1; lower numbers are in bin -1."""
    edges = [-1 + place / 128 for place in range(256)]
    bins = [sum(edge <= float(number) for edge in edges) - 1 for number in normalised]
    return f"Task: {instruction}, State: {' '.join(str(one) for one in bins)};\nAction: "


@dataclass
class Pi05Reference(Pi0Reference):
    """A checkpoint of pi0.5: its prefix in transformers' pi0, and the tensors of its expert."""

    text: str = ""
    """The text of the prompt."""

    def __post_init__(self) -> None:
        config = json.loads((self.folder / "config.json").read_text())
        self.config = PI0Config(**{**config, "model_type": "pi0"})
        self.model = PI0ForConditionalGeneration(self.config).eval().float()
        tensors = load_file(self.folder / "model.safetensors")
        prefix = {
            name.removeprefix(_VLM).replace("language_model.model.", "language_model."): torch.from_numpy(values)
            for name, values in tensors.items()
            if name.startswith(_VLM)
        }
        left = self.model.model.vlm.load_state_dict(prefix, strict=False)
        assert not left.missing_keys and not left.unexpected_keys
        self.tensors = {name: torch.from_numpy(values).double() for name, values in tensors.items()}
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def ids(self, cameras: int, instruction: str = "") -> list[int]:
        tokens = (self.side // 14) ** 2 * cameras
        text = f"{'<image>' * tokens}{self.tokenizer.bos_token}{self.text}"
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The layer `name` with its bias, if it has one."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, rows: torch.Tensor, condition: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows over their root mean square, scaled and shifted by their conditions; and the gates."""
        scale, shift, gate = self.linear(f"{EXPERT}{name}.dense", condition).chunk(3, dim=1)
        small = F.rms_norm(rows, rows.shape[1:], eps=self.config.dit_config.rms_norm_eps)
        return small * (1 + scale) + shift, gate

    def chunk(
        self,
        caches: Sequence[tuple[Array, Array]],
        visible: Sequence[Array],
        position: int,
        noise: Array,
        steps: int,
        held: Array | None = None,
    ) -> Array:
        """[chunk,action_dim] of the expert. In each layer it sees the rows `visible` [S] of the cache [1,1,S,h].

        The first actions are those `held`, at time 0 (arXiv 2512.05964, LeRobot's policies/pi05).
        """
        actions, width = torch.from_numpy(noise).double(), self.config.dit_config.hidden_size
        first = actions[:0] if held is None else torch.from_numpy(held)
        for step in range(steps):
            actions[: len(first)] = first
            times = [0.0 if row < len(first) else 1 - step / steps for row in range(len(actions))]
            condition = torch.stack([time_embedding(time, width, 4e-3, 4.0) for time in times])
            condition = F.silu(self.linear("time_mlp_out", F.silu(self.linear("time_mlp_in", condition))))
            rows = self.linear("action_in_proj", actions)
            for number, ((keys, values), seen) in enumerate(zip(caches, visible, strict=True)):
                name = f"layers.{number}"
                normed, gate = self.norm(f"{name}.input_layernorm", rows, condition)
                cache = torch.from_numpy(keys[0, 0, seen]), torch.from_numpy(values[0, 0, seen])
                mixed = self.attention(f"{EXPERT}{name}.self_attn", normed, *cache, position)
                rows = rows + gate * mixed
                normed, gate = self.norm(f"{name}.post_attention_layernorm", rows, condition)
                opened = F.gelu(self.linear(f"{EXPERT}{name}.mlp.gate_proj", normed), approximate="tanh")
                inner = opened * self.linear(f"{EXPERT}{name}.mlp.up_proj", normed)
                rows = rows + gate * self.linear(f"{EXPERT}{name}.mlp.down_proj", inner)
            velocity = self.linear("action_out_proj", self.norm("norm", rows, condition)[0])
            actions = actions - velocity / steps
        actions[: len(first)] = first
        return actions.numpy()

    def attention(
        self, name: str, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int
    ) -> torch.Tensor:
        """Every row attends to the cache and to all rows. One head of keys and values serves all queries."""
        query = self.linear(f"{name}.q_proj", rows).unflatten(1, (-1, keys.shape[1])).transpose(0, 1)
        key = torch.cat([keys, rotated(self.linear(f"{name}.k_proj", rows), position)])
        value = torch.cat([values, self.linear(f"{name}.v_proj", rows)])
        every = (x.expand(len(query), -1, -1) for x in (key, value))
        mixed = F.scaled_dot_product_attention(rotated(query, position), *every)
        return self.linear(f"{name}.o_proj", mixed.transpose(0, 1).flatten(1))


def time_embedding(time: float, width: int, shortest: float, longest: float) -> torch.Tensor:
    """Sines, then cosines, at periods from the shortest to the longest in equal ratios. LeRobot's time is in fp32."""
    periods = shortest * (longest / shortest) ** np.linspace(0, 1, width // 2)
    angles = torch.from_numpy(2 * np.pi * float(np.float32(time)) / periods)
    return torch.cat([angles.sin(), angles.cos()])


def rotated(rows: torch.Tensor, position: int) -> torch.Tensor:
    """Rows [...,S,h] at consecutive positions, halves rotated by theta 10000."""
    first, second = rows.chunk(2, dim=-1)
    half = first.shape[-1]
    angles = torch.from_numpy((position + np.arange(rows.shape[-2]))[:, None] * 10000.0 ** (-np.arange(half) / half))
    sine, cosine = angles.sin(), angles.cos()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
