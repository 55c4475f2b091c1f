"""pi0.5 by its published description: the prefix of transformers' PaliGemma, and an expert in plain numpy.

The expert is written from arXiv 2504.16054, openpi's models/pi0.py and LeRobot's policies/pi05, a formula after the
other, in fp64.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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
        self.tensors = {name: values.astype(np.float64) for name, values in tensors.items()}
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    def ids(self, cameras: int, instruction: str = "") -> list[int]:
        tokens = (self.side // 14) ** 2 * cameras
        text = f"{'<image>' * tokens}{self.tokenizer.bos_token}{self.text}"
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def linear(self, name: str, x: Array) -> Array:
        """The layer `name` with its bias, if it has one."""
        product: Array = x @ self.tensors[f"{name}.weight"].T
        return product + self.tensors.get(f"{name}.bias", np.float64(0))

    def norm(self, name: str, rows: Array, condition: Array) -> tuple[Array, Array]:
        """The rows over their root mean square, scaled and shifted by their conditions; and the gates."""
        scale, shift, gate = np.split(self.linear(f"{EXPERT}{name}.dense", condition), 3, axis=1)
        small = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + self.config.dit_config.rms_norm_eps)
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
        actions, expert = noise.astype(np.float64), self.config.dit_config
        first = actions[:0] if held is None else held
        for step in range(steps):
            actions[: len(first)] = first
            times = [0.0 if row < len(first) else 1 - step / steps for row in range(len(actions))]
            condition = np.stack([time_embedding(time, expert.hidden_size, 4e-3, 4.0) for time in times])
            condition = silu(self.linear("time_mlp_out", silu(self.linear("time_mlp_in", condition))))
            rows = self.linear("action_in_proj", actions)
            for number, ((keys, values), seen) in enumerate(zip(caches, visible, strict=True)):
                name = f"layers.{number}"
                normed, gate = self.norm(f"{name}.input_layernorm", rows, condition)
                mixed = self.attention(
                    f"{EXPERT}{name}.self_attn", normed, keys[0, 0, seen], values[0, 0, seen], position
                )
                rows = rows + gate * mixed
                normed, gate = self.norm(f"{name}.post_attention_layernorm", rows, condition)
                opened = gelu(self.linear(f"{EXPERT}{name}.mlp.gate_proj", normed))
                inner = opened * self.linear(f"{EXPERT}{name}.mlp.up_proj", normed)
                rows = rows + gate * self.linear(f"{EXPERT}{name}.mlp.down_proj", inner)
            velocity = self.linear("action_out_proj", self.norm("norm", rows, condition)[0])
            actions = actions - velocity / steps
        actions[: len(first)] = first
        return actions

    def attention(self, name: str, rows: Array, keys: Array, values: Array, position: int) -> Array:
        """Every row attends to the cache and to all rows. One head of keys and values serves all queries."""
        heads, size = self.config.dit_config.num_attention_heads, keys.shape[-1]
        key = rotated(self.linear(f"{name}.k_proj", rows), position)
        every = np.concatenate([keys, key]), np.concatenate([values, self.linear(f"{name}.v_proj", rows)])
        mixed = []
        for query in np.split(self.linear(f"{name}.q_proj", rows), heads, axis=1):
            scores = rotated(query, position) @ every[0].T / np.sqrt(size)
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed.append(shares / shares.sum(axis=1, keepdims=True) @ every[1])
        return self.linear(f"{name}.o_proj", np.concatenate(mixed, axis=1))


def time_embedding(time: float, width: int, shortest: float, longest: float) -> Array:
    """Sines, then cosines, at periods from the shortest to the longest in equal ratios. LeRobot's time is in fp32."""
    periods = shortest * (longest / shortest) ** np.linspace(0, 1, width // 2)
    angles = 2 * np.pi * float(np.float32(time)) / periods
    return np.concatenate([np.sin(angles), np.cos(angles)])


def rotated(rows: Array, position: int) -> Array:
    """Rows at consecutive positions, halves rotated by theta 10000."""
    half = rows.shape[1] // 2
    angles = (position + np.arange(len(rows)))[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second = rows[:, :half], rows[:, half:]
    turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
    return np.concatenate(turned, axis=1)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    """The approximation with tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
