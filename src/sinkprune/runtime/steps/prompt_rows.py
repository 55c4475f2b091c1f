"""The rows of a prompt: embedded texts and visual tokens, with their positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from math import prod
from typing import Annotated, NamedTuple, TypedDict

import numpy as np

from sinkprune.contract.checks import Bounds, SchemaError, from_json
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.contract.manifest import PLACEHOLDER_ROW, Manifest
from sinkprune.contract.precision import DTYPES, Array, PrecisionName
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.families import Positions, Rotary
from sinkprune.runtime.steps.chain import EncodedPicture

_DTYPES: dict[PrecisionName, str] = {"fp32": "F32", "fp16": "F16"}
_HEADER_BYTES = 1 << 20
_Offset = Annotated[int, Bounds(0, 1 << 50)]


class _Tensor(TypedDict):
    """An entry of a safetensors header (https://github.com/huggingface/safetensors#format)."""

    dtype: str
    shape: tuple[_Offset, ...]
    data_offsets: tuple[_Offset, ...]


class Embedding:
    """The tensor `weight` [vocab,d] of a safetensors file, and its named rows [d].

    Rows are read through the held file: a request needs few, and a robot has no gigabyte to spare for the table. The
    safetensors package maps the file, and a truncated mapped file ends the process.
    """

    def __init__(self, file: HeldFile, manifest: Manifest) -> None:
        """Read the file's header; raises `BundleError` for a file without a matching table."""
        lm = manifest.language_model
        self._file, self._vocab, self._width = file, lm.vocab_size, lm.hidden_size
        self._precision, self.deepstack_width = manifest.precision, manifest.deepstack_width
        self._dtype = DTYPES[manifest.precision]
        self._row_bytes = self._width * self._dtype.itemsize
        try:
            # The file begins with the length of its header.
            length = int.from_bytes(file.read_at(0, min(8, file.size)), "little")
            self._start = 8 + length
            header = parsed_json(file.read_at(8, max(0, min(length, _HEADER_BYTES, file.size - 8))))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            self._tensors = {name: from_json(_Tensor, entry, name) for name, entry in tensors.items()}
        except (UnreadableError, SchemaError, AttributeError) as error:
            raise BundleError(
                f"'{file.path}' is no safetensors file: its header is malformed ({error}). Export or copy the bundle "
                "again."
            ) from error
        self._table = self._offset("weight", (self._vocab, self._width))
        self._own: Mapping[int, Array] = {}

    def with_rows(self, rows: Mapping[int, Array]) -> Embedding:
        """Return the same table with further rows [d], by negative numbers."""
        other = copy(self)
        other._own = {**self._own, **rows}
        return other

    def __call__(self, ids: Sequence[int]) -> Array:
        """Return rows [len(ids),d] in the table's type.

        Raises `BundleError` for an id without a row, and for a file that was altered.
        """
        stored = [token for token in ids if token not in self._own]
        for token in stored:
            if not 0 <= token < self._vocab:
                raise BundleError(
                    f"the tokenizer gave the token {token}, the embedding table in '{self._file.path}' has "
                    f"{self._vocab} rows. They do not belong together: export the bundle again."
                )
        read = self._rows([self._table + token * self._row_bytes for token in stored])
        if len(stored) == len(ids):
            return read
        rows = iter(read)
        return np.stack([self._own[token] if token in self._own else next(rows) for token in ids])

    def named(self, name: str) -> Array:
        """Return the learned row [d] of that name, such as `image_newline`, in the table's type.

        Raises `BundleError` if there is none.
        """
        return self._rows([self._offset(name, (self._width,))])[0]

    def _rows(self, offsets: Sequence[int]) -> Array:
        read = self._file.read_each(offsets, self._row_bytes)
        return np.frombuffer(b"".join(read), self._dtype).reshape(-1, self._width)

    def _offset(self, name: str, shape: tuple[int, ...]) -> int:
        expected, found = _DTYPES[self._precision], self._tensors.get(name)
        if found is None or (found["dtype"], found["shape"]) != (expected, shape):
            state = f"{found['dtype']}{list(found['shape'])}" if found else "not there"
        else:
            start, *ends = found["data_offsets"]
            if ends == [start + prod(shape) * self._dtype.itemsize] and self._start + ends[0] <= self._file.size:
                return self._start + start
            state = f"at {list(found['data_offsets'])} of {self._file.size - self._start} bytes"
        raise BundleError(
            f"'{self._file.path}': its tensor '{name}' is {state}, expected {expected}{list(shape)}. Export the "
            "bundle again."
        )


class PlacedRows(NamedTuple):
    """Rows of a picture whose positions are those of kept tokens that only the device knows."""

    rows: Array
    """[V] int64: their numbers in the prompt."""
    positions: Array
    """[A,G*N] int64: the position of each token of the picture."""
    kept: Tensor
    """[G',n0] int64 on the device: as `EncodedPicture.kept_index`."""


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
    """[L] int64: the text rows after the last picture, without a policy's rows that are no text."""
    actions: Array
    """[A] int64: the rows that become actions, each before its placeholder; only in some policies."""
    positions: Positions
    """In the rows of `placed`, those of other tokens."""
    placed: Sequence[PlacedRows] = ()
    deepstack_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """[1,S,E] float on the device, by name: the additional inputs of `decoder_0`, for models with DeepStack."""

    @cached_property
    def length(self) -> int:
        """S, the number of rows."""
        return self.positions.rows.shape[-1]

    def rotary_tables(self, backend: Backend, rotary: Rotary) -> dict[str, Tensor]:
        """Return `cos` and `sin` [1,S,w] on the device."""
        parts = [[backend.tensor(table) for table in rotary.tables(self.positions.rows)]]
        order, count = np.arange(self.length), self.length
        for placed in self.placed:
            cos, sin = (backend.tensor(table[0]) for table in rotary.tables(placed.positions))
            groups = placed.kept.shape[0]
            first = np.arange(groups)[:, None] * (placed.positions.shape[1] // groups)
            parts.append([*backend.at_tokens(cos, sin, placed.kept, backend.tensor(first))])
            order[placed.rows] = np.arange(count, count + len(placed.rows))
            count += len(placed.rows)
        tables = (own[0] if len(own) == 1 else backend.join(own, order) for own in zip(*parts, strict=True))
        return dict(zip(("cos", "sin"), tables, strict=True))


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
    whole, last = np.concatenate(order), place - len(texts[-1])
    deepstack_inputs = {}
    if embedding.deepstack_width:
        zeros = backend.tensor(np.zeros((len(table), embedding.deepstack_width), table.dtype))
        deepstack_inputs["deepstack"] = backend.join([zeros, *(one.deepstack for one in encoded)], whole)
    own_positions = positions([len(ids) for ids in texts], [(part.layout, part.tokens) for part in shown])
    placed = []
    # A picture with such rows is in one part.
    for part, own in zip(shown, visual[1:], strict=True):
        if part.kept is not None and part.layout.places is not None:
            start = own_positions.rows[:, own[:1]] - part.layout.places[:, part.tokens[:1]]
            placed.append(PlacedRows(own, start + part.layout.places, part.kept))
    return PromptRows(
        hidden=backend.join([backend.tensor(table), *(one.embeddings for one in encoded)], whole),
        visual=np.concatenate(visual),
        picture=np.concatenate([no_rows, *(np.full(len(part.rows), part.picture) for part in shown)]),
        source=np.concatenate([no_rows, *(part.rows for part in shown)]),
        text=last + np.flatnonzero(np.array(texts[-1]) >= 0),
        actions=last + np.flatnonzero(np.array(texts[-1]) == PLACEHOLDER_ROW) - 1,
        positions=own_positions,
        placed=placed,
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
    kept: Tensor | None = None
    """[G',n0] the kept tokens, if they matter and only the device knows them; `tokens` are others then."""


def _parts(
    layouts: Sequence[VisualLayout], encoded: Sequence[EncodedPicture], first: int, *, pruned: bool
) -> Iterator[_Part]:
    """Yield the parts of all pictures; `first` is the number of the first picture's first row."""
    for number, (layout, own) in enumerate(zip(layouts, encoded, strict=True)):
        rows = np.arange(own.rows) if pruned else layout.unpruned_rows
        tokens, kept = rows, None
        if pruned and layout.parts == 1 and layout.places is not None:
            kept = own.unread
        if pruned and kept is None and (layout.parts > 1 or layout.places is not None):
            # How many rows each part has depends on the tokens, and texts stand between parts: wait for the device.
            tokens = own.source_tokens
        if layout.parts == 1:
            yield _Part(layout, number, first, rows, tokens, kept)
        else:
            for group in range(layout.parts):
                inside = tokens // layout.tokens == group
                yield _Part(layout, number, first, rows[inside], tokens[inside])
        first += own.rows


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
