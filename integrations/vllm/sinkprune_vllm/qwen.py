"""Qwen2.5-VL and Qwen3-VL with a sanitizer behind the vision tower, along the path of vLLM's pruned videos.

The first axis of a prompt's positions, where each picture and text begins, is known before the choice. The place of a
kept token in its picture is in more columns of its embedding, which vLLM hands back to the model for the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from sinkprune_vllm.option import counts_in
from sinkprune_vllm.processing import PrunedProcessor, for_option
from sinkprune_vllm.sanitizer import received_attention, select

BASE = 256
"""A row and a column are two digits each of this base, which bf16 holds exactly."""
DIGITS = 4


class _PrunedInfo:
    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {"image": None, "video": 0}

    def get_num_image_tokens(self, **picture: Any) -> int:
        return counts_in(self.ctx.model_config, super().get_num_image_tokens(**picture)).kept


class _PrunedProcessor(PrunedProcessor):
    def _get_prompt_updates(self, **given: Any) -> list[Any]:
        return [replace(each, replacement=self._kept(each)) for each in super()._get_prompt_updates(**given)]

    def _kept(self, update: Any) -> Callable[[int], list[int]]:
        def placeholders(picture: int) -> list[int]:
            every = update.replacement(picture)
            return every[: counts_in(self.info.ctx.model_config, len(every)).kept]

        return placeholders


class _Pruned:
    """What both models have in common."""

    first_norm = "norm"
    """The merger's module that receives the last block's output."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.visual.blocks[-2].attn.attn.register_forward_pre_hook(self._see_attention, with_kwargs=True)
        # vLLM's way to compile mergers calls none of their own hooks.
        getattr(self.visual.merger, self.first_norm).register_forward_pre_hook(self._see_last_block)

    def _see_attention(self, module: torch.nn.Module, inputs: Any, named: Any) -> None:
        self.attending = named["query"][0], named["key"][0]

    def _see_last_block(self, module: torch.nn.Module, inputs: Any) -> None:
        self.norms = inputs[0].float().norm(dim=-1).flatten()

    def _postprocess_image_embeds_evs(self, image_embeds_split: Sequence[Tensor], image_input: Any) -> Any:
        grids = [(rows, columns) for _, rows, columns in image_input["image_grid_thw"].tolist()]
        patches = [rows * columns for rows, columns in grids]
        seen = (of_all.split(patches) for of_all in (*self.attending, self.norms))
        del self.attending, self.norms
        return tuple(map(self._kept, image_embeds_split, grids, *seen))

    def _kept(self, rows: Tensor, grid: tuple[int, int], query: Tensor, key: Tensor, norms: Tensor) -> Tensor:
        """Return the kept ones of a picture's `rows`, each with its place."""
        config, (lengths, order) = self.config.vision_config, self._sequences(*grid)
        side = config.spatial_merge_size
        salience = received_attention(query, key, lengths)
        if self.visual.blocks[-2].attn.tp_size > 1:
            # Heads that other devices have count as well.
            salience = tensor_model_parallel_all_reduce(salience)
        of_unit = salience.view(-1, side * side).sum(-1), norms.view(-1, side * side).amax(-1)
        salience, norms = (each[None] if order is None else each[None, order] for each in of_unit)
        counts = counts_in(self.model_config, len(rows))
        kept, index = select(rows[None], salience, counts, norms, config.out_hidden_size)
        row, column = index[0] // (grid[1] // side), index[0] % (grid[1] // side)
        digits = torch.stack([row // BASE, row % BASE, column // BASE, column % BASE], 1)
        return torch.cat([kept[0], digits.to(kept.dtype)], 1)

    def _sequences(self, height: int, width: int) -> tuple[list[int], Tensor | None]:
        """Return the lengths of the sequences of patches that attend, and where among them each token's are."""
        return [height * width], None

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        # To the next token. A picture's tokens have the place of the first until they are chosen.
        steps = torch.ones(len(input_tokens), dtype=torch.long)
        for feature in mm_features:
            start, length = feature.mm_position.offset, feature.mm_position.length
            _, *sides = feature.data["image_grid_thw"].data.tolist()
            steps[start : start + length] = 0
            steps[start + length - 1] = max(sides) // self.config.vision_config.spatial_merge_size
        ends = steps.cumsum(0)
        return (ends - steps).repeat(3, 1), int(ends[-1]) - len(input_tokens)

    def recompute_mrope_positions(
        self, input_ids: Any, multimodal_embeddings: Any, mrope_positions: Tensor, num_computed_tokens: int
    ) -> tuple[list[Tensor], Tensor, int]:
        positions = mrope_positions.clone()
        with gpu_sync_allowed():
            if multimodal_embeddings:
                digits = torch.cat([rows[:, -DIGITS:] for rows in multimodal_embeddings]).to(positions)
                places = digits[:, ::2] * BASE + digits[:, 1::2]
                ids = torch.as_tensor(input_ids, device=positions.device)[num_computed_tokens:]
                slots = num_computed_tokens + (ids == self.config.image_token_id).nonzero()[: len(places), 0]
                positions[1:, slots] = positions[0, slots] + places.T
            delta = int(positions[0, -1]) + 1 - positions.shape[1]
        return [rows[:, :-DIGITS] for rows in multimodal_embeddings], positions, delta


@for_option(_PrunedInfo, _PrunedProcessor)
class PrunedQwen25(_Pruned, Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL, whose tower puts patches in the order of windows, within which most of its blocks attend."""

    first_norm = "ln_q"

    def _sequences(self, height: int, width: int) -> tuple[list[int], Tensor | None]:
        tower = self.visual
        _, _, order, ends, _ = tower.get_rope_by_thw(1, height, width)
        windowed = len(tower.blocks) - 2 not in tower.fullatt_block_indexes
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist() if windowed else [height * width]
        return lengths, tower.invert_permutation(order).to(tower.device)


@for_option(_PrunedInfo, _PrunedProcessor)
class PrunedQwen3(_Pruned, Qwen3VLForConditionalGeneration):
    """Qwen3-VL: a token's DeepStack features are columns behind its own, and are kept and averaged with it."""
