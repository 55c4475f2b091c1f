"""The order and positions of a prompt's rows whose tokens only the device knows: the host does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.backends.small_graphs import AT_ROWS, IN_PARTS, LINE, PLACES_OF
from sinkprune.runtime.families import Rotary


class UnreadRows(NamedTuple):
    """The rows of a picture. They are laid out as if each had the first token of its group."""

    layout: VisualLayout
    kept: Tensor
    """[G',n0] int64 on the device: the token of each row, numbered within its group."""
    first_tokens: Array
    """[G',1] int64: the first token of each group, numbered through all."""
    rows: Array
    """[G'*n0] int64: their numbers in the prompt."""
    visual: Array
    """[G'*n0] int64: their numbers among the prompt's visual rows."""
    starts: Sequence[int]
    """The position from which the places of each part count."""
    texts: Sequence[int]
    """The text rows before each part but the first."""

    @property
    def moves(self) -> bool:
        """Whether the tokens decide which part a row is in."""
        return self.kept.shape[0] < self.layout.parts


class RowsOnDevice:
    """What becomes of rows that are laid out without their tokens."""

    def __init__(self, backend: Backend, length: int, visual: Array, pictures: Sequence[UnreadRows]) -> None:
        """Take a prompt of `length` rows, of which `visual` [V] are visual; called in the backend's `turn`."""
        self._backend, self._pictures, self._length = backend, pictures, length
        self.visual = backend.tensor(visual)
        """[V] int64 on the device: the rows that are visual tokens, ascending."""
        moving = [one for one in pictures if one.moves]
        self._order = backend.tensor(np.arange(length)[None]) if moving else None
        for one in moving:
            self._move(one)

    def _move(self, own: UnreadRows) -> None:
        """Move each row of a picture to the part of its token, behind earlier rows of this part."""
        count, before = own.kept.shape[1], np.array([0, *accumulate(own.texts)])
        first, lines = own.layout.tokens * np.arange(len(before))[:, None, None], -(-count // LINE)
        inputs = {
            # After the last row there is one of no part.
            "lines": np.minimum(np.arange(lines * LINE), count).reshape(lines, LINE),
            "first": first,
            "end": first + own.layout.tokens,
            "texts_before": before[:, None, None].astype(np.float32),
            "earlier_lines": np.triu(np.ones((lines, lines), np.float32), 1),
            "number": np.arange(count),
            "text_part": np.repeat(np.arange(1, len(before)), own.texts)[None],
            "text_number": np.arange(before[-1])[None],
            "first_row": own.rows[:1],
            "first_visual": own.visual[:1],
            "count": np.array([count]),
        }
        given = {name: self._backend.tensor(array) for name, array in inputs.items()}
        given |= {"kept": own.kept, "order": self._order, "visual": self.visual}
        moved = self._backend.small(IN_PARTS)(given)
        self._order, self.visual = moved["order_out"], moved["visual_out"]

    def in_order(self, rows: Tensor) -> Tensor:
        """Return `rows` [1,S,w] of the prompt as they move."""
        return rows if self._order is None else self._rows_at(rows, self._order, np.zeros((1, 1), np.int64))

    def rotary_tables(self, rotary: Rotary, positions: Array) -> list[Tensor]:
        """Return cos and sin [1,S,w], where `positions` [A,S] are those of the rows as they are laid out.

        Where tokens have no places, a position is a row's number, wherever the row comes from.
        """
        parts = [[self._backend.tensor(table) for table in rotary.tables(positions)]]
        order, count = np.arange(self._length), self._length
        for one in self._pictures:
            if one.layout.places is None:
                return parts[0]
            starts = np.repeat(one.starts, one.layout.all_tokens // len(one.starts))
            own = rotary.tables(starts + one.layout.places)
            parts.append([self._rows_at(self._backend.tensor(table), one.kept, one.first_tokens) for table in own])
            order[one.rows] = np.arange(count, count + len(one.rows))
            count += len(one.rows)
        return [self.in_order(self._backend.join(own, order)) for own in zip(*parts, strict=True)]

    def _rows_at(self, rows: Tensor, index: Tensor, first: Array) -> Tensor:
        """Return [G,n,w]: those of `rows` [1,P,w] that `index` [G,n] int64 names, counted from `first` [G,1]."""
        engine = self._backend.small(AT_ROWS, rows.dtype.name)
        return engine({"rows": rows, "index": index, "first": self._backend.tensor(first)})["rows_out"]


def places_of(backend: Backend, merged: Tensor, kept: Tensor) -> Tensor:
    """Return [G,n] int64: the places of the tokens `kept` of a tower that merges, from `Scores.merged`."""
    return backend.small(PLACES_OF, merged.shape[1])({"merged": merged, "kept": kept})["places"]
