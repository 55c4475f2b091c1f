"""The order and positions of a prompt's rows whose tokens only the device knows: the host does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.backends.small_graphs import AT_TOKENS, IN_ORDER, IN_PARTS, LINE
from sinkprune.runtime.families import Positions, Rotary
from sinkprune.runtime.steps.chain import EncodedPicture


class UnreadRows(NamedTuple):
    """The rows of a picture. They are laid out as if each had the first token of its group."""

    layout: VisualLayout
    index: Tensor
    """`EncodedPicture.kept_index` [G',n0] on the device."""
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
        return self.index.shape[0] < self.layout.parts


class RowsOnDevice:
    """What becomes of rows that are laid out without their tokens."""

    def __init__(
        self,
        backend: Backend,
        layouts: Sequence[VisualLayout],
        encoded: Sequence[EncodedPicture],
        index: Sequence[Tensor | None],
        texts: Sequence[int],
        picture: Array,
        visual: Array,
        positions: Positions,
    ) -> None:
        """Take pictures, `EncodedPicture.index_on_device` of each, and the lengths of the texts around their parts.

        The rest is of the prompt as it is laid out: `visual` [V] are its visual rows, `picture` [V] the number of the
        picture of each. Called in the backend's `turn`.
        """
        self._backend, self._positions = backend, positions.rows
        self.visual = backend.tensor(visual)
        """[V] int64 on the device: the rows that are visual tokens, ascending."""
        self._pictures, end = list[UnreadRows](), 0
        for number, (layout, own, on_device) in enumerate(zip(layouts, encoded, index, strict=True)):
            parts, rows = slice(end, end + layout.parts), np.flatnonzero(picture == number)
            end = parts.stop
            if on_device is not None:
                starts, between = positions.starts[parts], texts[parts][1:]
                own_rows = UnreadRows(layout, on_device, own.first_tokens, visual[rows], rows, starts, between)
                self._pictures.append(own_rows)
        moving = [one for one in self._pictures if one.moves]
        self._order = backend.tensor(np.arange(positions.rows.shape[1])[None]) if moving else None
        for one in moving:
            self._move(one)

    def _move(self, own: UnreadRows) -> None:
        count, before = own.index.shape[1], np.array([0, *accumulate(own.texts)])
        first, lines = own.layout.tokens * np.arange(len(before))[:, None, None], -(-count // LINE)
        inputs = {
            "first": first,
            "end": first + own.layout.tokens,
            "texts_before": before[:, None, None].astype(np.float32),
            "text_part": np.repeat(np.arange(1, len(before)), own.texts)[None],
            "first_row": own.rows[:1],
            "first_visual": own.visual[:1],
            "count": np.array([count]),
            "number": np.arange(count),
            "text_number": np.arange(before[-1])[None],
            "lines": np.minimum(np.arange(lines * LINE), count).reshape(lines, LINE),
            "earlier_lines": np.triu(np.ones((lines, lines), np.float32), 1),
        }
        given = {name: self._backend.tensor(array) for name, array in inputs.items()}
        given |= {"kept": own.index, "order": self._order, "visual": self.visual}
        moved = self._backend.small(IN_PARTS)(given)
        self._order, self.visual = moved["order_out"], moved["visual_out"]

    def in_order(self, rows: Tensor) -> Tensor:
        """Return `rows` [1,S,w] of the prompt as they move."""
        if self._order is None:
            return rows
        engine = self._backend.small(IN_ORDER, rows.dtype.name)
        return engine({"rows": rows, "order": self._order})["rows_out"]

    def rotary_tables(self, rotary: Rotary) -> list[Tensor]:
        """Return cos and sin [1,S,w]."""
        backend, laid_out = self._backend, rotary.tables(self._positions)
        parts = [[backend.tensor(table) for table in laid_out]]
        # Pictures of a family are alike. Without places, a position is a row's number, wherever the row comes from.
        if self._pictures[0].layout.places is None:
            return parts[0]
        count = self._positions.shape[1]
        order = np.arange(count)
        for one in self._pictures:
            starts = np.repeat(one.starts, one.layout.all_tokens // len(one.starts))
            cos, sin = (backend.tensor(table[0]) for table in rotary.tables(starts + one.layout.places))
            given = {"cos": cos, "sin": sin, "kept": one.index, "first": backend.tensor(one.first_tokens)}
            own = backend.small(AT_TOKENS, cos.dtype.name, cos.shape[1])(given)
            parts.append([own["cos_out"], own["sin_out"]])
            order[one.rows] = np.arange(count, count + len(one.rows))
            count += len(one.rows)
        return [self.in_order(backend.join(own, order)) for own in zip(*parts, strict=True)]
