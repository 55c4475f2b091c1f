"""A prompt as the rows that the decoder is given: text and pictures in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from sinkprune.runtime.embedding import Embedding
from sinkprune.runtime.families import Family
from sinkprune.runtime.rotary import Positions

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PictureRows:
    """A picture in a prompt."""

    size: Any
    """Width and height of an image, or the size of a clip."""
    hidden: Array
    """[V,d]."""
    tokens: Array
    """[V] the token each row stands for, counted through all groups; -1 at the end of an unpruned line."""


@dataclass(frozen=True)
class PromptRows:
    """All rows of a prompt."""

    hidden: Array
    """[S,d]."""
    visual: Array
    """[V] the rows that are visual tokens, ascending."""
    picture: Array
    """[V] the number of the picture each of them belongs to."""
    text: Array
    """[L] the text rows behind the last picture."""
    positions: Positions


def prompt_rows(
    family: Family, embedding: Embedding, texts: Sequence[Sequence[int]], pictures: Sequence[PictureRows]
) -> PromptRows:
    """`texts` (token ids) with `pictures` between them: one text before each picture and one behind the last."""
    parts = zip_longest((embedding(ids) for ids in texts), (picture.hidden for picture in pictures))
    hidden = [part for part in chain.from_iterable(parts) if part is not None]
    ends = np.cumsum([len(part) for part in hidden])
    counts = [len(picture.hidden) for picture in pictures]
    visual = [np.arange(end - count, end) for end, count in zip(ends[1::2], counts, strict=True)]
    positions = family.positions(
        [len(ids) for ids in texts], [(picture.size, picture.tokens) for picture in pictures]
    )
    return PromptRows(
        np.concatenate(hidden),
        np.concatenate(visual),
        np.repeat(np.arange(len(pictures)), counts),
        np.arange(ends[-2], ends[-1]),
        positions,
    )
