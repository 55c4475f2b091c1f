"""The training's OpenVLA-OFT: two towers, a decoder in both directions, and an L1 head, with the original's names.

Its SigLIP tower and its decoder begin as those of the pocket robot's pi0. DINOv2, projector and head are new.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import l1_loss
from transformers import PI0ForConditionalGeneration, PreTrainedTokenizerFast

from oft_model import BOS, DINO_MEAN, DINO_STD, EMPTY, PATCH, OftModel
from pocket_training.robot.batches import Batch, Form, normalised, sampled_moments
from pocket_training.robot.losses import Prefix, Seen
from pocket_training.robot.model import ACTION, CAMERAS, CHUNK, GRID, STATE, Statistics, position_waves
from pocket_training.robot.robot import Robot
from pocket_training.stages import OFT_STAGES
from pocket_training.tokenizer import train_tokenizer
from sinkprune import demo
from sinkprune.demo.robot_table import SIDE, RobotTable
from sinkprune.demo.scenes import COLOURS, SHAPES
from sinkprune.export.checkpoint.presets import PRESETS

_PIXELS = GRID * PATCH
"""Pictures of 168 pixels have as many patches as pi0's of 96."""
_DINO, _SIGLIP, _WIDTH, _HEAD = 64, 128, 128, 32
_DEPTHS, _RATIOS, _HEADS, _REGISTERS = (3, 4), (3.0, 3.0), (4, 4), 4
_BLOCKS = 2
"""Residual blocks of the action head."""
_SPECIAL = ("<unk>", "<s>", "</s>", "<PAD>")
_PAD = 3
_VOCABULARY = 384
"""Tokens of the tokenizer. The training has the lone space after them, in the place of `EMPTY`."""
_GELU = 1.702
"""GELU is nearly a SiLU of so many times its input."""
_PROMPT = "In: What action should the robot take to {}?\nOut:"
_PAIRS = len(COLOURS) * len(SHAPES)


class TrainedOft(OftModel):
    """The model of the training. `summary` is no part of the checkpoint."""

    def __init__(self) -> None:
        config, head = model_config(), {"chunk": CHUNK, "action_dim": ACTION, "blocks": _BLOCKS, "state_dim": STATE}
        # The checkpoint's vocabulary holds the lone space, and nothing between.
        text = {**config["text_config"], "vocab_size": _VOCABULARY + 1}
        super().__init__({**config, "text_config": text, "action_head": head})
        self.summary = nn.Sequential(nn.LayerNorm(_DINO), nn.Linear(_DINO, _PAIRS))


class OftRobot(Robot):
    """An OpenVLA-OFT of 2.5 million parameters."""

    stages = OFT_STAGES
    imitation, own_losses = "actions", ("holds", "actions")

    def __init__(self) -> None:
        self.model, self.tokenizer = TrainedOft(), new_tokenizer()
        self.form = Form(pixels, self._ids, bounds())
        self.tower_width, self.decoder = _DINO + _SIGLIP, self.model.decoder
        start_from(self, Path(demo.__file__).parent / "pocket-robot")

    def _ids(self, instruction: str) -> list[int]:
        text = self.tokenizer.encode(_PROMPT.format(instruction), add_special_tokens=False).ids
        return [*text, _VOCABULARY]

    def see(self, batch: Batch) -> Seen:
        shape = (*batch.patches.shape, -1)
        cls, tokens = self.model.towers(batch.pixels.flatten(0, 1), batch.patches.flatten(0, 1))
        return Seen(tokens.view(shape), self.model.project(tokens).view(shape), self.model.summary(cls))

    def read(self, seen: Seen, batch: Batch) -> Prefix:
        """Run BOS, the visual tokens, the state, the text, a row of zeros for each number, and the stop token.

        The prefix that the losses read ends with the question mark, which is the last word's row.
        """
        visual, text = CAMERAS * batch.patches.shape[-1], batch.ids.shape[1]
        places = (batch.patches + torch.arange(CAMERAS)[:, None] * GRID**2).flatten(1)
        state = batch.state[:, :STATE].clamp(-1, 1)
        rows, positions = self.model.rows(seen.visual.flatten(1, 2), places, CAMERAS * GRID**2, batch.ids, state)
        out = self.model.decode(rows, positions, output_hidden_states=True)
        asked = 2 + visual + text - self._after_mark
        taught = torch.tensor([*range(1, 1 + visual), *range(2 + visual, asked)])
        layers = tuple(layer[:, taught] for layer in out.hidden_states)
        return Prefix(layers, positions[:, taught], self.model.actions(out.last_hidden_state))

    @property
    def _after_mark(self) -> int:
        """The tokens after the question mark: those of the answer's beginning, and the lone space."""
        return 1 + len(self.tokenizer.encode("\nOut:", add_special_tokens=False).ids)

    def imitate(self, prefix: Prefix, batch: Batch) -> torch.Tensor:
        return l1_loss(prefix.actions, batch.actions)

    @torch.no_grad()
    def act(self, tables: Sequence[RobotTable], instructions: Sequence[str], seed: int) -> NDArray[np.float32]:
        seen_pixels, states = self.observed(tables)
        patches = torch.arange(GRID**2).expand(len(tables), CAMERAS, -1)
        ids = torch.tensor([self.form.ids(instruction) for instruction in instructions])
        none = torch.empty(0)
        batch = Batch(seen_pixels, patches, none, none, ids, states, none, none)
        return self.in_robots_units(self.read(self.see(batch), batch).actions)

    def save(self, folder: Path) -> None:
        save(self.model, self.tokenizer, self.form.statistics, folder)


def pixels(picture: Image.Image) -> NDArray[np.float32]:
    """Return [3,168,168] between -1 and 1: the frame as OpenVLA's processor stretches it."""
    return normalised(picture.resize((_PIXELS, _PIXELS), Image.Resampling.BICUBIC))


def new_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer with one token for each word of a prompt."""
    texts = (_PROMPT.format(f"pick the {colour} {shape}") for colour in COLOURS for shape in SHAPES)
    return train_tokenizer(texts, _SPECIAL, "<unk>", _VOCABULARY)


@cache
def bounds() -> Statistics:
    """Return the centre and half the distance of what becomes -1 and 1: q01 and q99, and the gripper as it is."""
    numbers = [np.round(np.quantile(values, (0.01, 0.99), axis=0), 4) for values in sampled_moments()]
    numbers[1][:, -1] = -1, 1
    ends = [tuple(map(float, values)) for low, high in numbers for values in ((high + low) / 2, (high - low) / 2)]
    return Statistics(*ends)


def text_config() -> dict[str, Any]:
    """Return the decoder's configuration, with the ids of OpenVLA."""
    return {
        "hidden_size": _WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": _WIDTH // _HEAD,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "vocab_size": (EMPTY // 64 + 1) * 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": False,
    }


@torch.no_grad()
def start_from(robot: OftRobot, folder: Path) -> None:
    """Copy SigLIP's tower, the projector, the decoder and the words of the trained pi0 in `folder`.

    The first units of the projector also pass the tower's last norm on, with the usual deviation of a row.
    """
    pi0 = PI0ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    vlm, model = pi0.model.vlm, robot.model
    dino, siglip = model.vision_backbone.values()
    _start_dino(dino)
    _start_siglip(siglip, vlm.vision_tower)
    table = RobotTable("training 0")
    seen = siglip(torch.from_numpy(np.stack([pixels(picture) for picture in table.cameras()])), _all_patches(2))
    _start_projector(model.projector, vlm, seen.std(-1).median())
    _start_decoder(robot.decoder, vlm.language_model)
    _copy_words(robot, vlm.get_input_embeddings(), Tokenizer.from_file(str(folder / "tokenizer.json")))


def _all_patches(pictures: int) -> torch.Tensor:
    return torch.arange(GRID**2).expand(pictures, -1)


def _start_dino(tower: Any) -> None:
    """Initialise attention to near and alike patches, as pi0's tower began."""
    tower.pos_embed.copy_(position_waves(_DINO))
    nn.init.normal_(tower.patch_embed["proj"].weight, std=0.06)
    for block in tower.blocks:
        query, key, _ = block.attn["qkv"].weight.chunk(3)
        nn.init.normal_(block.attn["qkv"].weight, std=_DINO**-0.5)
        key.copy_(query)
        for part in (block.attn["proj"], block.mlp["fc2"]):
            nn.init.normal_(part.weight, std=(2 * _DINO * len(tower.blocks)) ** -0.5)


def _start_siglip(tower: Any, other: Any) -> None:
    """Copy a tower whose patches have 8 pixels: a patch of 14 is one of 8 that was stretched by the processor."""
    embeddings = other.embeddings
    unit = np.eye(SIDE, dtype=np.float32)
    stretched = np.asarray(Image.fromarray(unit).resize((_PIXELS, SIDE), Image.Resampling.BICUBIC)).T
    # In the picture's middle, where no edge is near.
    middle, side = GRID // 2, SIDE // GRID
    there = unit[middle * side : (middle + 1) * side]
    inverse = np.linalg.pinv(stretched[middle * PATCH : (middle + 1) * PATCH])
    shrink = torch.from_numpy((there @ inverse).astype(np.float32))
    own = tower.patch_embed["proj"]
    own.weight.copy_(torch.einsum("dcyx,yj,xi->dcji", embeddings.patch_embedding.weight, shrink, shrink))
    own.bias.copy_(embeddings.patch_embedding.bias)
    tower.pos_embed.copy_(embeddings.position_embedding.weight)
    for block, layer in zip(tower.blocks, other.encoder.layers, strict=True):
        attention, qkv = layer.self_attn, block.attn["qkv"]
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        qkv.bias.copy_(torch.cat([part.bias for part in parts]))
        pairs = (
            *((block.norm1, layer.layer_norm1), (block.norm2, layer.layer_norm2)),
            *((block.attn["proj"], attention.out_proj), (block.mlp["fc1"], layer.mlp.fc1)),
            (block.mlp["fc2"], layer.mlp.fc2),
        )
        for mine, theirs in pairs:
            mine.load_state_dict(theirs.state_dict())


def _start_projector(projector: Any, vlm: Any, deviation: torch.Tensor) -> None:
    """Let the first units compute pi0's projector after a norm with a fixed `deviation`."""
    # GELU passes large values on.
    shift, norm, linear = 8.0, vlm.vision_tower.post_layernorm, vlm.multi_modal_projector.linear
    first, second, third = projector.values()
    for layer in (first, second, third):
        nn.init.normal_(layer.weight, std=0.5 * layer.in_features**-0.5)
        layer.bias.zero_()
    centred = torch.eye(_SIGLIP) - 1 / _SIGLIP
    first.weight[:_WIDTH] = 0.0
    first.weight[:_WIDTH, _DINO:] = linear.weight * norm.weight / deviation @ centred
    first.bias[:_WIDTH] = linear.weight @ norm.bias + linear.bias + shift
    second.weight[:, :_WIDTH] = torch.eye(_WIDTH)
    second.weight[:, _WIDTH:] *= 0.1
    third.weight.copy_(torch.eye(_WIDTH))
    third.bias.fill_(-shift)


def _start_decoder(decoder: Any, other: Any) -> None:
    """Copy Gemma's layers. Its norms multiply by 1 + w, and its GELU is nearly a scaled SiLU."""
    decoder.norm.weight.copy_(1 + other.norm.weight)
    for layer, theirs in zip(decoder.layers, other.layers, strict=True):
        layer.self_attn.load_state_dict(theirs.self_attn.state_dict())
        layer.mlp.load_state_dict(theirs.mlp.state_dict())
        layer.mlp.gate_proj.weight *= _GELU
        layer.mlp.down_proj.weight /= _GELU
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, norm).weight.copy_(1 + getattr(theirs, norm).weight)


def _copy_words(robot: OftRobot, other: Any, known: Tokenizer) -> None:
    """Copy the rows of words that pi0 has too."""
    words = robot.decoder.embed_tokens.weight
    words.normal_()
    vocabulary = known.get_vocab()
    pairs = {own: vocabulary[token] for token, own in robot.tokenizer.get_vocab().items() if token in vocabulary}
    # What is asked ends with a question mark, where pi0's prompts have the line's end.
    line, mark = vocabulary["Ċ"], robot.tokenizer.token_to_id("?")
    pairs |= {BOS: vocabulary["<bos>"], _VOCABULARY: line} | ({} if mark is None else {mark: line})
    words[list(pairs)] = other(torch.tensor([*pairs.values()]))


def save(model: nn.Module, tokenizer: Tokenizer, numbers: Statistics, folder: Path) -> None:
    """Write `model` as OpenVLA-OFT's training leaves it: the parts that are no VLA in files of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().half() for name, value in model.state_dict().items()}
    name = "language_model.model.embed_tokens.weight"
    table = torch.zeros(text_config()["vocab_size"], _WIDTH, dtype=torch.float16)
    table[:_VOCABULARY], table[EMPTY] = tensors[name][:_VOCABULARY], tensors[name][_VOCABULARY]
    tensors[name] = table
    for part in ("action_head", "proprio_projector"):
        own = {key.partition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{part}.")}
        torch.save(own, folder / f"{part}--latest_checkpoint.pt")
    of_vla = ("vision_backbone.", "projector.", "language_model.")
    save_file({key: value for key, value in tensors.items() if key.startswith(of_vla)}, folder / "model.safetensors")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<PAD>"
    ).save_pretrained(folder)
    for file, fields in _files(numbers).items():
        (folder / file).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def model_config() -> dict[str, Any]:
    """Return the checkpoint's configuration, as OpenVLA's has it."""
    towers = zip((_DINO, _SIGLIP), _DEPTHS, _RATIOS, _HEADS, (_REGISTERS, 0), strict=True)
    names = "embed_dim", "depth", "num_heads", "mlp_ratio", "reg_tokens"
    published = {name: value for name, value in PRESETS["openvla-7b"].items() if name != "action_dim"}
    return {
        **published,
        "image_sizes": [_PIXELS] * 2,
        # The last block of a tower is never run, and is not in the file.
        "timm_model_args": [
            dict(zip(names, (width, depth + 1, heads, ratio, registers), strict=True))
            for width, depth, ratio, heads, registers in towers
        ],
        "pad_token_id": _PAD,
        "text_config": {"model_type": "llama", **text_config()},
    }


def _files(numbers: Statistics) -> dict[str, Any]:
    two = {"mean": (DINO_MEAN, (0.5,) * 3), "std": (DINO_STD, (0.5,) * 3)}
    processor = {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, _PIXELS, _PIXELS]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": two["mean"],
        "stds": two["std"],
        "use_fused_vision_backbone": True,
    }
    statistics: dict[str, dict[str, Any]] = {}
    pairs = {
        "proprio": (numbers.state_mean, numbers.state_std),
        "action": (numbers.actions_mean, numbers.actions_std),
    }
    for kind, (centre, half) in pairs.items():
        ends = ((-1, "q01"), (1, "q99"))
        statistics[kind] = {
            end: [round(c + sign * h, 6) for c, h in zip(centre, half, strict=True)] for sign, end in ends
        }
    statistics["action"]["mask"] = [True, True, False]
    return {
        "config.json": model_config(),
        "preprocessor_config.json": processor,
        "processor_config.json": {"processor_class": "PrismaticProcessor"},
        "dataset_statistics.json": {"robot_table": statistics},
    }
