"""A prompt as the rows that the decoder is given: text and pictures in their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from itertools import chain as joined
from typing import NamedTuple

import numpy as np

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.families.rotary import Positions
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.encoding import Encoded


@dataclass(frozen=True)
class PromptRows:
    """All S rows of a prompt, of which V are visual."""

    hidden: Tensor
    """[1,S,d] float on the device: the embeddings of all rows."""
    visual: Array
    """[V] int64: the rows that are visual tokens, ascending."""
    picture: Array
    """[V] int64: the number of the picture each of them belongs to."""
    source: Array
    """[V] int64: which of its picture's rows each of them is."""
    text: Array
    """[L] int64: the text rows behind the last picture."""
    positions: Positions
    beside: Mapping[str, Tensor] = field(default_factory=dict)
    """[1,S,E] float on the device, by name: what `decoder_0` takes of the rows beside the inputs of all segments."""

    @property
    def length(self) -> int:
        """S, the number of rows."""
        return self.positions.rows.shape[-1]


def lay_out(
    backend: Backend,
    embedding: Embedding,
    between_rows: str | None,
    texts: Sequence[Sequence[int]],
    pictures: Sequence[tuple[VisualLayout, Encoded]],
    *,
    pruned: bool,
) -> PromptRows:
    """`texts` (token ids) with `pictures` between them: one text before each part of a picture, one behind the last.

    Unpruned, a picture's rows stand in the order of the model's own prompt, and `between_rows` names the learned row
    at the end of a line. Rows are joined on the device. Of a picture in several parts, each row stands in that of its
    token's group.
    """
    table = embedding([*joined.from_iterable(texts)])
    if between_rows is not None:
        table = np.concatenate([table, embedding.named(between_rows)[None]])
    line_end, starts = len(table) - 1, [0, *accumulate(map(len, texts))]
    shown = [*_parts(pictures, len(table), pruned=pruned)]
    order, visual, place = [], [], 0
    for number, ids in enumerate(texts):
        order.append(np.arange(starts[number], starts[number + 1]))
        place += len(ids)
        if number < len(shown):
            rows = shown[number].rows
            order.append(np.where(rows < 0, line_end, shown[number].behind + rows))
            visual.append(np.arange(place, place + len(rows)))
            place += len(rows)
    whole = np.concatenate(order)
    beside = {
        name: backend.join([backend.tensor(zeros), *(encoded.deepstack for _, encoded in pictures)], whole)
        for name, zeros in embedding.beside(len(table)).items()
    }
    return PromptRows(
        hidden=backend.join([backend.tensor(table), *(encoded.embeddings for _, encoded in pictures)], whole),
        visual=np.concatenate(visual),
        picture=np.concatenate([np.full(len(part.rows), part.picture) for part in shown]),
        source=np.concatenate([part.rows for part in shown]),
        text=np.arange(place - len(texts[-1]), place),
        positions=positions([len(ids) for ids in texts], [(part.layout, part.tokens) for part in shown]),
        beside=beside,
    )


class _Part(NamedTuple):
    """Rows of a picture that stand in a prompt one behind the other."""

    layout: VisualLayout
    picture: int
    """The picture's number."""
    behind: int
    """How many rows stand before the picture's, where all that there are stand one behind the other."""
    rows: Array
    """Which of the picture's rows they are; -1 is the end of a line."""
    tokens: Array
    """The token each stands for, counted through all groups."""


def _parts(pictures: Sequence[tuple[VisualLayout, Encoded]], behind: int, *, pruned: bool) -> Iterator[_Part]:
    """The parts of all pictures, whose rows stand behind `behind` others."""
    for number, (layout, encoded) in enumerate(pictures):
        rows = np.arange(encoded.kept_index.size) if pruned else layout.unpruned_rows
        tokens = encoded.source_tokens if pruned else rows
        if layout.parts == 1:
            yield _Part(layout, number, behind, rows, tokens)
        else:
            for group in range(layout.parts):
                own = tokens // layout.tokens == group
                yield _Part(layout, number, behind, rows[own], tokens[own])
        behind += encoded.kept_index.size


def positions(texts: Sequence[int], pictures: Sequence[tuple[VisualLayout, Array]]) -> Positions:
    """The positions of a prompt's rows: texts of so many rows, and between them pictures of the `tokens` [V].

    Text counts on along all axes; a token of a picture adds its own places, whatever was dropped beside it. New
    tokens go on from the largest position of all.
    """
    rows, place, latest = [], 0, 0
    for count, picture in zip_longest(texts, pictures):
        rows.append(np.arange(place, place + count)[None])
        place += count
        if picture is not None:
            layout, tokens = picture
            if layout.places is None:
                rows.append(np.arange(place, place + len(tokens))[None])
                place += len(tokens)
            else:
                rows.append(place + layout.places[:, tokens])
                latest = max(latest, place + int(layout.places.max()) + 1)
                place += layout.extent
    axes = max(map(len, rows))
    return Positions(
        np.concatenate([np.broadcast_to(part, (axes, part.shape[1])) for part in rows], axis=1), max(place, latest)
    )
