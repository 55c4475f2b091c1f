"""The rows of a prompt about one image as Qwen's models see them, with some of the image's tokens kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from sinkprune import Pipeline
from support.references.masking import Array, Sequence, embedded
from support.references.steps import patch_grid


def qwen_sequence(
    model: Any,
    pipe: Pipeline,
    image: Image.Image,
    prompt: str,
    tokens: Array,
    index: list[int],
    beside: Array | None,
) -> Sequence:
    """[before ; kept ; after], the kept `tokens` [n0,d] at the positions transformers gives the tokens `index`.

    `beside` [sets,n0,d] is what goes with them (DeepStack).
    """
    question = pipe.prompts.encode(["", prompt])
    before, after = (embedded(model, ids) for ids in (question.texts[0], question.texts[-1]))
    token, grid = model.config.image_token_id, patch_grid(pipe, image)
    n = int(np.prod(grid)) // model.config.vision_config.spatial_merge_size**2
    ids = torch.tensor([[*question.texts[0], *[token] * n, *question.texts[-1]]])
    positions, _ = model.model.get_rope_index(ids, (ids == token).int(), torch.tensor([grid]))
    start = len(before)
    rows = [*range(start), *(start + np.array(index)), *range(start + n, ids.shape[1])]
    end = start + len(index)
    return Sequence(
        np.concatenate([before, tokens, after]),
        list(range(start, end)),
        list(range(end, len(rows))),
        positions[:, 0, rows].numpy(),
        "qwen2.5-vl",
        deepstack=beside,
    )
