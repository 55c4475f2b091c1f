"""LLaVA-1.5 and LLaVA-NeXT with a sanitizer between the vision tower and the projector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.llava import LlavaForConditionalGeneration
from vllm.model_executor.models.llava_next import LlavaNextForConditionalGeneration

from sinkprune_vllm.option import counts_in
from sinkprune_vllm.processing import PrunedProcessor, for_option
from sinkprune_vllm.sanitizer import Counts, cls_salience, select

ON_A_PROCESSOR = 4
"""Pictures or tiles that the tower sees at once. A processor's caches do not hold the activations of many: each of 16
takes CLIP-L 8 % longer than each of 4."""


def counts_of_tile(model_config: Any) -> Counts:
    vision = model_config.hf_config.vision_config
    return counts_in(model_config, (vision.image_size // vision.patch_size) ** 2)


def tiles(config: Any, height: int, width: int) -> int:
    """Return the tiles of a picture, the whole picture included; LLaVA-1.5 has no other."""
    if config.model_type == "llava":
        return 1
    rows, columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return 1 + rows * columns


class _PrunedInfo:
    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        return counts_of_tile(self.ctx.model_config).kept * tiles(self.get_hf_config(), image_height, image_width)


class _Pruned:
    """What both models have in common: they keep rows of the tower's output by its last block's attention."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.counts = counts_of_tile(vllm_config.model_config)
        self.salience: Tensor | None = None
        last = self.vision_tower.vision_model.encoder.layers[-1].self_attn
        last.qkv_proj.register_forward_hook(self._see_attention)

    def _see_attention(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        attention = self.vision_tower.vision_model.encoder.layers[-1].self_attn
        query, key, _ = output[0].chunk(3, dim=-1)
        heads = attention.num_heads_per_partition, attention.head_dim
        total = cls_salience(query[:, 0].unflatten(-1, heads), key.unflatten(-1, heads))
        # Heads that other devices have count as well.
        self.salience = tensor_model_parallel_all_reduce(total) if attention.tp_size > 1 else total

    def _image_pixels_to_features(self, vision_tower: torch.nn.Module, pixel_values: Tensor) -> Tensor:
        at_once = ON_A_PROCESSOR if pixel_values.is_cpu else len(pixel_values)
        return torch.cat([self._kept_rows(vision_tower, part) for part in pixel_values.split(at_once)])

    def _kept_rows(self, vision_tower: torch.nn.Module, pixel_values: Tensor) -> Tensor:
        tokens = super()._image_pixels_to_features(vision_tower, pixel_values)
        salience, self.salience = self.salience, None
        if salience is None:
            raise RuntimeError("the vision tower ran without its hooks, so its tokens cannot be selected")
        return select(tokens, salience, self.counts)[0]


@for_option(_PrunedInfo, PrunedProcessor)
class PrunedLlava(_Pruned, LlavaForConditionalGeneration):
    """LLaVA-1.5: a picture is one group."""


@for_option(_PrunedInfo, PrunedProcessor)
class PrunedLlavaNext(_Pruned, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT: the whole picture and each tile are one group each, without line ends or padding."""

    def _merge_image_patch_embeddings(self, image_size: Tensor, patch_embeddings: Tensor, *, strategy: str) -> Tensor:
        # A batch may have filled up the tiles of a smaller picture.
        return patch_embeddings[: tiles(self.config, *image_size.tolist())].flatten(0, 1)
