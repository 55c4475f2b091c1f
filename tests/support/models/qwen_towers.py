"""The vision towers of Qwen in transformers, with eager attention, and what the method reads of them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
from transformers.vision_utils import get_vision_window_index


class Features(NamedTuple):
    """Of N merged tokens in raster order, frame after frame."""

    tokens: torch.Tensor
    norms: torch.Tensor
    salience: torch.Tensor
    deepstack: torch.Tensor | None
    """[N,E], one set beside the other."""


@torch.no_grad()
def features(visual: Any, pixels: torch.Tensor, grid: torch.Tensor, block: int) -> Features:
    """What the tower `visual` gives for `pixels` [patches,1176], with the attention of `block`.

    Towers with windows are put into raster order by transformers' own window index.
    """
    module, received = sys.modules[type(visual).__module__], []
    eager = module.eager_attention_forward

    def recorded(attention: Any, *arguments: Any, **options: Any) -> Any:
        output, weights = eager(attention, *arguments, **options)
        if attention is visual.blocks[block].attn:
            # Sum over the queries of this window or frame, mean over heads
            received.append(weights[0].mean(dim=0).sum(dim=0))
        return output, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", recorded)
        out = visual(pixels, grid_thw=grid)
    raster = torch.arange(len(pixels) // 4)
    if hasattr(visual, "window_size"):
        order, _ = get_vision_window_index(grid, spatial_merge_size=2, window_size=112, patch_size=14)
        raster = torch.argsort(order)
    salience = torch.cat(received).view(-1, 4).mean(dim=1) / len(pixels)
    norms = out.last_hidden_state.norm(dim=1).view(-1, 4).amax(dim=1)
    beside = getattr(out, "deepstack_features", None)
    return Features(
        out.pooler_output, norms[raster], salience[raster], None if beside is None else torch.cat(beside, dim=1)
    )
