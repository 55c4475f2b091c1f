"""A prompt as the rows that the decoder is given: text and pictures in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from itertools import chain as joined

import numpy as np

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.embedding import Embedding
from sinkprune.runtime.encoding import Encoded
from sinkprune.runtime.rotary import Positions


@dataclass(frozen=True)
class PromptRows:
    """All S rows of a prompt, of which V are visual."""

    hidden: Tensor
    """[1,S,d] float on the device: the embeddings of all rows."""
    visual: Array
    """[V] int64: the rows that are visual tokens, ascending."""
    picture: Array
    """[V] int64: the number of the picture each of them belongs to."""
    text: Array
    """[L] int64: the text rows behind the last picture."""
    positions: Positions

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
    """`texts` (token ids) with `pictures` between them: one text before each picture and one behind the last.

    Unpruned, a picture's rows stand in the order of the model's own prompt, and `between_rows` names the learned row
    at the end of a line. Rows are joined on the device.
    """
    table = embedding([*joined.from_iterable(texts)])
    if between_rows is not None:
        table = np.concatenate([table, embedding.named(between_rows)[None]])
    line_end, behind, starts = len(table) - 1, len(table), [0, *accumulate(map(len, texts))]
    order, visual, picture_of, shown, place = [], [], [], [], 0
    for number, ids in enumerate(texts):
        order.append(np.arange(starts[number], starts[number + 1]))
        place += len(ids)
        if number < len(pictures):
            layout, encoded = pictures[number]
            count = encoded.kept_index.size
            rows = np.arange(count) if pruned else layout.unpruned_rows
            order.append(np.where(rows < 0, line_end, behind + rows))
            visual.append(np.arange(place, place + len(rows)))
            picture_of.append(np.full(len(rows), number))
            shown.append((layout, encoded.source_tokens if pruned else rows))
            behind, place = behind + count, place + len(rows)
    parts = [backend.tensor(table), *(encoded.embeddings for _, encoded in pictures)]
    return PromptRows(
        hidden=backend.join(parts, np.concatenate(order)),
        visual=np.concatenate(visual),
        picture=np.concatenate(picture_of),
        text=np.arange(place - len(texts[-1]), place),
        positions=positions([len(ids) for ids in texts], shown),
    )


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
