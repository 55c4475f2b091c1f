"""OpenVLA-OFT in PyTorch, with the tensors' names of the original code: transformers has no class for it.

Two towers without their last block, a projector of three layers, Llama in both directions, and an L1 head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from transformers import LlamaConfig, LlamaModel

PATCH = 14
BOS, STOP, EMPTY = 1, 2, 29871
"""Llama's tokens. `EMPTY` is a lone space, which ends each prompt."""
DINO_MEAN, DINO_STD = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
"""DINOv2's colours, as rounded in OpenVLA's files."""
PUBLISHED = (
    {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0, "reg_tokens": 4},
    {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362, "reg_tokens": 0},
)
"""timm's arguments of the towers, for configurations without `timm_model_args`."""


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale_factor * x


class _Block(nn.Module):
    """A block of timm's ViT, with layer scales for DINOv2."""

    def __init__(self, width: int, inner: int, heads: int, *, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})
        self.ls1, self.ls2 = (_Scale(width) if scaled else nn.Identity() for _ in range(2))
        self._heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.attn["proj"](scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        x = x + self.ls1(mixed)
        return x + self.ls2(self.mlp["fc2"](gelu(self.mlp["fc1"](self.norm2(x)))))


class _Tower(nn.Module):
    """A tower up to the block whose output OpenVLA reads; with `cls`, DINOv2."""

    def __init__(self, given: Mapping[str, Any], patches: int, *, cls: bool) -> None:
        super().__init__()
        width, heads = given["embed_dim"], given["num_heads"]
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, PATCH, PATCH)})
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, patches, width))
        self.special = 0
        if cls:
            self.special = 1 + given["reg_tokens"]
            self.cls_token = nn.Parameter(0.5 * torch.randn(1, 1, width))
            self.reg_token = nn.Parameter(0.5 * torch.randn(1, given["reg_tokens"], width))
        inner = int(width * given["mlp_ratio"])
        self.blocks = nn.ModuleList(_Block(width, inner, heads, scaled=cls) for _ in range(given["depth"] - 1))

    def forward(self, pixels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the rows [G,special+V,D] of the `kept` patches [G,V] of pictures [G,3,s,s]."""
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        x = x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))
        if self.special:
            before = torch.cat([self.cls_token, self.reg_token], 1)
            x = torch.cat([before.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return x


class _ActionHead(nn.Module):
    def __init__(self, width: int, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self._chunk, self._numbers = sizes["chunk"], sizes["action_dim"]
        wide = self._numbers * width
        self.layer_norm1, self.fc1 = nn.LayerNorm(wide), nn.Linear(wide, width)
        parts = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(sizes["blocks"])
        )
        self.mlp_resnet_blocks = nn.ModuleList(nn.ModuleDict({"ffn": part}) for part in parts)
        self.layer_norm2, self.fc2 = nn.LayerNorm(width), nn.Linear(width, self._numbers)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [B,chunk,numbers] for the rows [B,chunk*numbers,d] that a number each is read from."""
        x = self.fc1(self.layer_norm1(rows.unflatten(1, (self._chunk, self._numbers)).flatten(2))).relu()
        for block in self.mlp_resnet_blocks.children():
            x = x + block.get_submodule("ffn")(x)
        found: torch.Tensor = self.fc2(self.layer_norm2(x))
        return found


class OftModel(nn.Module):
    """OpenVLA-OFT of a configuration with `action_head`, whose state has at least one number."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dino, siglip = config.get("timm_model_args", PUBLISHED)
        self.patches, self.head = (config["image_sizes"][0] // PATCH) ** 2, config["action_head"]
        towers = {
            "featurizer": _Tower(dino, self.patches, cls=True),
            "fused_featurizer": _Tower(siglip, self.patches, cls=False),
        }
        self.vision_backbone = nn.ModuleDict(towers)
        text = {name: value for name, value in config["text_config"].items() if name != "model_type"}
        decoder = LlamaModel(LlamaConfig(**text, attn_implementation="sdpa"))
        both, width = dino["embed_dim"] + siglip["embed_dim"], decoder.config.hidden_size
        layers = {"fc1": (both, 4 * both), "fc2": (4 * both, width), "fc3": (width, width)}
        self.projector = nn.ModuleDict({name: nn.Linear(*ends) for name, ends in layers.items()})
        self.language_model = nn.ModuleDict({"model": decoder})
        state = {"fc1": nn.Linear(self.head["state_dim"], width), "fc2": nn.Linear(width, width)}
        self.proprio_projector = nn.ModuleDict(state)
        self.action_head = nn.ModuleDict({"model": _ActionHead(width, self.head)})

    @property
    def decoder(self) -> Any:
        return self.language_model["model"]

    def towers(self, pixels: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return DINOv2's CLS rows [G,D] and the tokens [G,V,D+E] of pictures between -1 and 1."""
        mean, std = (torch.tensor(values).to(pixels.dtype).view(3, 1, 1) for values in (DINO_MEAN, DINO_STD))
        tower, other = self.vision_backbone.values()
        dino = tower((pixels / 2 + 0.5 - mean) / std, kept)
        return dino[:, 0], torch.cat([dino[:, tower.special :], other(pixels, kept)], -1)

    def project(self, tokens: torch.Tensor) -> torch.Tensor:
        x = gelu(self.projector["fc1"](tokens))
        return self.projector["fc3"](gelu(self.projector["fc2"](x)))

    def rows(
        self, visual: torch.Tensor, places: torch.Tensor, all_places: int, ids: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return BOS, the visual tokens, the state, the text, a row of zeros for each number, and the stop token.

        The visual tokens [B,V,d] have the `places` [B,V] of `all_places`. `ids` [B,T] are the text's, and states
        [B,numbers] normalised. The results are [B,S,d] and the positions [B,S].
        """
        words, count = self.decoder.embed_tokens, len(ids)
        bos, stop = (words(torch.full((count, 1), token)) for token in (BOS, STOP))
        zeros = torch.zeros_like(bos).expand(-1, self.head["chunk"] * self.head["action_dim"], -1)
        row = self.proprio_projector["fc2"](gelu(self.proprio_projector["fc1"](state)))[:, None]
        after = torch.cat([row, words(ids), zeros, stop], 1)
        first = torch.zeros(count, 1, dtype=torch.long)
        last = 1 + all_places + torch.arange(after.shape[1]).expand(count, -1)
        return torch.cat([bos, visual, after], 1), torch.cat([first, 1 + places, last], 1)

    def decode(self, rows: torch.Tensor, positions: torch.Tensor, **options: Any) -> Any:
        """Run the decoder on `rows` [B,S,d], each of which sees all."""
        mask = rows.new_zeros(len(rows), 1, rows.shape[1], rows.shape[1])
        return self.decoder(
            inputs_embeds=rows, position_ids=positions, attention_mask=mask, use_cache=False, **options
        )

    def actions(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [B,chunk,numbers] from all rows after the last norm: each row predicts the next one's number."""
        numbers = self.head["chunk"] * self.head["action_dim"]
        found: torch.Tensor = self.action_head["model"](hidden[:, -numbers - 2 : -2])
        return found
