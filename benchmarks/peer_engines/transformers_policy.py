"""Robot policies in PyTorch, with scaled dot product attention: transformers' own pi0, and OpenVLA-OFT."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from peer_engines.checkpoint import chat_text
from peer_engines.engine import Loaded, Question, Timing
from peer_engines.robot import CAMERAS, largest_change, moment
from sinkprune.export.checkpoint.folder import read_json


def load_pi0(place: Path, dtype: Any) -> Loaded:
    """Load pi0 on the CPU, with states and noise in `dtype`."""
    import torch
    from transformers import PI0ForConditionalGeneration

    checkpoint = place / "checkpoint"
    model = PI0ForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").eval()
    config, tokenizer = model.config, Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    vision = config.vlm_config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    tower, prefix = _LastCall(model.model.vlm.vision_tower), _LastCall(model.model.vlm)

    def answer(question: Question) -> Timing:
        frames, state, noise = moment(
            question, CAMERAS["pi0"], config.max_state_dim, (config.chunk_size, config.max_action_dim)
        )
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


def load_oft(place: Path, dtype: Any) -> Loaded:
    """Load OpenVLA-OFT on the CPU."""
    import torch
    from safetensors.torch import load_file

    from oft_model import BOS, EMPTY, OftModel

    checkpoint = place / "checkpoint"
    config = read_json(checkpoint, "config.json")
    with torch.device("meta"):
        model = OftModel(config).to(dtype)
    # Shard by shard: the whole file and the model do not fit into memory together.
    for shard in sorted(checkpoint.glob("*.safetensors")):
        own = {name: value.to(dtype) for name, value in load_file(shard).items()}
        model.load_state_dict(own, strict=False, assign=True)
    decoder = model.eval().decoder
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config)
    tokenizer, cameras = Tokenizer.from_file(str(checkpoint / "tokenizer.json")), CAMERAS["openvla_oft"]
    tower, prefix = _LastCall(model.vision_backbone["fused_featurizer"]), _LastCall(decoder)
    chunk = model.head["chunk"], model.head["action_dim"]

    def answer(question: Question) -> Timing:
        frames, state, noise = moment(question, cameras, model.head["state_dim"], chunk)
        start = time.perf_counter()
        pixels = torch.from_numpy(np.stack(frames).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1)
        _, tokens = model.towers(pixels.to(dtype), torch.arange(model.patches).expand(cameras, -1))
        text = tokenizer.encode(chat_text(checkpoint, question.text.lower())).ids
        ids = [*(token for token in text if token not in (BOS, config["pad_token_id"])), EMPTY]
        visual = model.project(tokens).flatten(0, 1)[None]
        places, given = torch.arange(visual.shape[1])[None], torch.from_numpy(state)[None].clamp(-1, 1).to(dtype)
        rows, positions = model.rows(visual, places, visual.shape[1], torch.tensor([ids]), given)
        actions = model.actions(model.decode(rows, positions).last_hidden_state)[0].float().numpy()
        end = time.perf_counter()
        parts = {"vision": (tower.end - start) * 1e3, "prefill": (prefix.end - tower.end) * 1e3}
        step = (end - prefix.end) * 1e3
        return Timing((end - start) * 1e3, step, rows.shape[1], largest_change(actions, noise), parts)

    head = sum(parameter.nbytes for parameter in model.action_head.parameters())
    return Loaded(answer, {name: version(name) for name in ("torch", "transformers")}, head)


class _LastCall:
    """When a module's last call ended."""

    def __init__(self, module: Any) -> None:
        self.end = 0.0
        module.register_forward_hook(self._ended)

    def _ended(self, *_: Any) -> None:
        self.end = time.perf_counter()
