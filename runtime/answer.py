"""An answer, and what became of the visual tokens on the way to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Kept:
    """What became of an image's visual tokens. Indices are into the N tokens of a group."""

    size: Any
    """The image's size, as its family takes it: width and height, or a `ClipSize`."""
    index: Array
    """[G,n0] the tokens the LLM received; row 0 of a plan with a sink stands for all outliers."""
    norms: Array
    """[G,N] token norms."""
    salience: Array
    """[G,N] token salience."""
    after_stage: dict[int, Array]
    """By pruning layer: the places in `index` (flattened) that survived it, ascending."""


@dataclass(frozen=True)
class Answer:
    """An answer and how it came about."""

    text: str
    token_ids: list[int]
    finish: str
    """`stop` (the model ended it) or `length` (max_new_tokens did)."""
    method: str
    budget: str
    prompt_tokens: int
    """Text tokens of the rendered prompt; visual tokens are counted apart."""
    visual_tokens: int
    """Visual tokens of all images before anything is dropped."""
    tokens_per_layer: list[int]
    """Visual tokens each decoder layer ran on."""
    kv_bytes: int
    """Bytes of keys and values after the prefill."""
    ms: dict[str, float | None]
    """preprocess, vision, sanitizer, projector, prefill, select, ttft, per_token (None for one token), latency."""
    images: tuple[Kept, ...]
    """What became of each image's tokens."""

    @property
    def kept(self) -> Kept:
        """That of the first image."""
        return self.images[0]
