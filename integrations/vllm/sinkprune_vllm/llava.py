"""LLaVA-1.5 and LLaVA-NeXT with a sanitizer between the vision tower and the projector.

vLLM asks the processing info how many placeholders a picture gets, and the processor for its key in the caches. The
model then makes as many rows. Without the option, all three are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.llava import (
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.model_executor.models.llava_next import (
    LlavaNextForConditionalGeneration,
    LlavaNextMultiModalProcessor,
    LlavaNextProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from sinkprune_vllm.option import FAMILIES, budget_of, cache_key, counts_of
from sinkprune_vllm.sanitizer import Counts, cls_salience, select


def counts(config: Any, architecture: str) -> Counts | None:
    """Return the counts of a tile; None for a model without the option."""
    budget = budget_of(config)
    if budget is None:
        return None
    side = config.vision_config.image_size // config.vision_config.patch_size
    return counts_of(FAMILIES[architecture], budget, side * side)


def tiles(config: Any, height: int, width: int) -> int:
    """Return the tiles of a picture of LLaVA-NeXT, the whole picture included."""
    rows, columns = get_anyres_image_grid_shape(
        (height, width), config.image_grid_pinpoints, config.vision_config.image_size
    )
    return 1 + rows * columns


class _PrunedInfo:
    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        kept = counts(self.get_hf_config(), self.architecture)
        assert kept is not None
        return kept.kept * self.groups(image_height, image_width)


class _LlavaInfo(_PrunedInfo, LlavaProcessingInfo):
    architecture = "LlavaForConditionalGeneration"

    def groups(self, height: int, width: int) -> int:
        return 1


class _LlavaNextInfo(_PrunedInfo, LlavaNextProcessingInfo):
    architecture = "LlavaNextForConditionalGeneration"

    def groups(self, height: int, width: int) -> int:
        return tiles(self.get_hf_config(), height, width)


class _PrunedProcessor:
    def _get_mm_hashes(self, inputs: Any) -> Any:
        own = cache_key(budget_of(self.info.get_hf_config()) or "")
        hashes = super()._get_mm_hashes(inputs)
        return {kind: [f"{found}-{own}" for found in of_kind] for kind, of_kind in hashes.items()}


class _LlavaProcessor(_PrunedProcessor, LlavaMultiModalProcessor):
    pass


class _LlavaNextProcessor(_PrunedProcessor, LlavaNextMultiModalProcessor):
    pass


class _Pruned:
    """What both models have in common: they keep rows of the tower's output by its last block's attention."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.counts = counts(self.config, vllm_config.model_config.architecture)
        self.salience: Tensor | None = None
        if self.counts is not None:
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
        tokens = super()._image_pixels_to_features(vision_tower, pixel_values)
        if self.counts is None:
            return tokens
        salience, self.salience = self.salience, None
        if salience is None:
            raise RuntimeError("the vision tower ran without its hooks, so its tokens cannot be selected")
        return select(tokens, salience, self.counts)[0]


def _with_own_processor(info: type, processor: type) -> Callable[[type], type]:
    """Give a model these classes where its configuration has the option, and vLLM's where it has not."""

    def wrap(model: type) -> type:
        own = model._processor_factory

        def build_info(ctx: Any) -> Any:
            return own.info(ctx) if budget_of(ctx.model_config.hf_config) is None else info(ctx)

        def build_processor(made: Any, dummy_inputs: Any) -> Any:
            return (processor if isinstance(made, info) else own.processor)(made, dummy_inputs)

        register = MULTIMODAL_REGISTRY.register_processor
        return register(build_processor, info=build_info, dummy_inputs=own.dummy_inputs)(model)

    return wrap


@_with_own_processor(_LlavaInfo, _LlavaProcessor)
class PrunedLlava(_Pruned, LlavaForConditionalGeneration):
    """LLaVA-1.5: a picture is one group."""


@_with_own_processor(_LlavaNextInfo, _LlavaNextProcessor)
class PrunedLlavaNext(_Pruned, LlavaNextForConditionalGeneration):
    """LLaVA-NeXT: the whole picture and each tile are one group each, without line ends or padding."""

    def _merge_image_patch_embeddings(self, image_size: Tensor, patch_embeddings: Tensor, *, strategy: str) -> Tensor:
        if self.counts is None:
            return super()._merge_image_patch_embeddings(image_size, patch_embeddings, strategy=strategy)
        # A batch may have filled up the tiles of a smaller picture.
        return patch_embeddings[: tiles(self.config, *image_size.tolist())].flatten(0, 1)
