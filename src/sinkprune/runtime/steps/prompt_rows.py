"""The input rows of the decoder for a prompt: text and pictures in their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

import numpy as np

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.families.rotary import Positions
from sinkprune.runtime.steps.embedding import Embedding
from sinkprune.runtime.steps.encoding import EncodedPicture


@dataclass(frozen=True)
class PromptRows:
    """All S rows of a prompt, of which V are visual."""

    hidden: Tensor
    """[1,S,d] float on the device: the embeddings of all rows."""
    visual: Array
    """[V] int64: the rows that are visual tokens, ascending."""
    picture: Array
    """[V] int64: the picture's number of each visual row."""
    source: Array
    """[V] int64: the place of each visual row among its picture's rows."""
    text: Array
    """[L] int64: the text rows after the last picture."""
    positions: Positions
    deepstack_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """[1,S,E] float on the device, by name: the additional inputs of `decoder_0`, for models with DeepStack."""

    @property
    def length(self) -> int:
        """S, the number of rows."""
        return self.positions.rows.shape[-1]


def lay_out(
    backend: Backend,
    embedding: Embedding,
    between_rows: str | None,
    texts: Sequence[Sequence[int]],
    layouts: Sequence[VisualLayout],
    encoded: Sequence[EncodedPicture],
    *,
    pruned: bool,
) -> PromptRows:
    """Join `texts` (token ids) and pictures: one text before each part of a picture, and one after the last.

    Unpruned rows of a picture are in the order of the model's own prompt, with the learned row `between_rows` at the
    end of each line. In a picture of several parts, each row belongs to the part of its token's group. Rows are
    joined on the device.
    """
    table = embedding([*chain.from_iterable(texts)])
    if between_rows is not None:
        table = np.concatenate([table, embedding.named(between_rows)[None]])
    line_end, starts = len(table) - 1, [0, *accumulate(map(len, texts))]
    shown = [*_parts(layouts, encoded, len(table), pruned=pruned)]
    # A prompt without pictures has no visual rows.
    no_rows = np.arange(0)
    order, visual, place = [], [no_rows], 0
    for number, ids in enumerate(texts):
        order.append(np.arange(starts[number], starts[number + 1]))
        place += len(ids)
        if number < len(shown):
            rows = shown[number].rows
            order.append(np.where(rows < 0, line_end, shown[number].first + rows))
            visual.append(np.arange(place, place + len(rows)))
            place += len(rows)
    whole = np.concatenate(order)
    deepstack_inputs = {
        name: backend.join([backend.tensor(zeros), *(one.deepstack for one in encoded)], whole)
        for name, zeros in embedding.deepstack_zeros(len(table)).items()
    }
    return PromptRows(
        hidden=backend.join([backend.tensor(table), *(one.embeddings for one in encoded)], whole),
        visual=np.concatenate(visual),
        picture=np.concatenate([no_rows, *(np.full(len(part.rows), part.picture) for part in shown)]),
        source=np.concatenate([no_rows, *(part.rows for part in shown)]),
        text=np.arange(place - len(texts[-1]), place),
        positions=positions([len(ids) for ids in texts], [(part.layout, part.tokens) for part in shown]),
        deepstack_inputs=deepstack_inputs,
    )


class _Part(NamedTuple):
    """Rows of a picture that are adjacent in a prompt."""

    layout: VisualLayout
    picture: int
    """The picture's number."""
    first: int
    """The number of the picture's first row, where rows are numbered through the table of texts and all pictures."""
    rows: Array
    """The numbers of the rows within the picture; -1 is the end of a line."""
    tokens: Array
    """The token of each row, numbered through all groups."""


def _parts(
    layouts: Sequence[VisualLayout], encoded: Sequence[EncodedPicture], first: int, *, pruned: bool
) -> Iterator[_Part]:
    """Yield the parts of all pictures; `first` is the number of the first picture's first row."""
    for number, (layout, own) in enumerate(zip(layouts, encoded, strict=True)):
        rows = np.arange(own.kept_index.size) if pruned else layout.unpruned_rows
        tokens = own.source_tokens if pruned else rows
        if layout.parts == 1:
            yield _Part(layout, number, first, rows, tokens)
        else:
            for group in range(layout.parts):
                inside = tokens // layout.tokens == group
                yield _Part(layout, number, first, rows[inside], tokens[inside])
        first += own.kept_index.size


def positions(texts: Sequence[int], pictures: Sequence[tuple[VisualLayout, Array]]) -> Positions:
    """Return the positions of a prompt's rows: `texts` are lengths, `pictures` are layouts with kept tokens [V].

    Text advances along all axes. A kept token of a picture has the position that it has unpruned, where the family
    gives tokens places of their own. New tokens continue after the largest position.
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
