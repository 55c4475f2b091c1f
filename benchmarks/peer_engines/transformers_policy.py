"""transformers' own pi0 in PyTorch, with scaled dot product attention and `sample_actions`."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from peer_engines.checkpoint import chat_text
from peer_engines.engine import Loaded, Question, Timing
from peer_engines.robot import largest_change, moment


def load_policy(place: Path, dtype: Any) -> Loaded:
    """Load the policy on the CPU, with states and noise in `dtype`."""
    import torch
    from transformers import PI0ForConditionalGeneration

    checkpoint = place / "checkpoint"
    model = PI0ForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").eval()
    config, tokenizer = model.config, Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    vision = config.vlm_config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    tower, prefix = _LastCall(model.model.vlm.vision_tower), _LastCall(model.model.vlm)

    def answer(question: Question) -> Timing:
        frames, state, noise = moment(question, config.max_state_dim, (config.chunk_size, config.max_action_dim))
        start = time.perf_counter()
        pixels = np.stack(frames).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
        words = tokenizer.encode(chat_text(checkpoint, question.text, "")).ids
        ids = [config.vlm_config.image_token_id] * (tokens * len(frames)) + words
        given = torch.from_numpy(noise)[None].to(dtype)
        actions = model.sample_actions(
            state=torch.from_numpy(state)[None].to(dtype),
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            pixel_values=torch.from_numpy(pixels)[None].to(dtype),
            pixel_attention_mask=torch.ones(1, len(frames), dtype=torch.bool),
            noise=given,
            num_steps=question.new_tokens,
        )
        end = time.perf_counter()
        parts = {"vision": (tower.end - start) * 1e3, "prefill": (prefix.end - tower.end) * 1e3}
        step = (end - prefix.end) * 1e3 / question.new_tokens
        changed = largest_change(actions[0].float().numpy(), given[0].float().numpy())
        return Timing((end - start) * 1e3, step, len(ids), changed, parts)

    expert = sum(parameter.nbytes for parameter in model.model.dit.layers.parameters())
    return Loaded(answer, {name: version(name) for name in ("torch", "transformers")}, expert)


class _LastCall:
    """When a module's last call ended."""

    def __init__(self, module: Any) -> None:
        self.end = 0.0
        module.register_forward_hook(self._ended)

    def _ended(self, *_: Any) -> None:
        self.end = time.perf_counter()
