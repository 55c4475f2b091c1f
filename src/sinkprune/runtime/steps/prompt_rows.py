"""The rows of a prompt: embedded texts and visual tokens, with their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, zip_longest
from math import prod
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypedDict

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

if TYPE_CHECKING:
    from sinkprune.runtime.steps.rows_on_device import RowsOnDevice

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


class RowsOnHost(NamedTuple):
    """Where a prompt's V visual rows stand and come from, and the positions of all rows."""

    visual: Array
    """[V] int64: the rows that are visual tokens, ascending."""
    source: Array
    """[V] int64: the place of each visual row among its picture's rows."""
    positions: Positions


@dataclass(frozen=True)
class PromptRows:
    """All S rows of a prompt, of which V are visual."""

    hidden: Tensor
    """[1,S,d] float on the device: the embeddings of all rows."""
    read: Callable[[], RowsOnHost]
    """Returns `on_host`, which may have to be read from the device."""
    picture: Array
    """[V] int64: the picture's number of each visual row."""
    text: Array
    """[L] int64: the text rows after the last picture, without a policy's rows that are no text."""
    actions: Array
    """[A] int64: the rows that become actions, each before its placeholder; only in some policies."""
    length: int
    """S, the number of rows."""
    next_position: int
    """The position of the first new token, the same on every axis."""
    on_device: RowsOnDevice | None = None
    """The order and positions of rows that only the device knows; None if the host knows all."""
    deepstack_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """[1,S,E] float on the device, by name: the additional inputs of `decoder_0`, for models with DeepStack."""

    @cached_property
    def on_host(self) -> RowsOnHost:
        """What the host knows of the rows; the first use is in the backend's `turn`."""
        return self.read()

    def state(self, backend: Backend, rotary: Rotary) -> dict[str, Tensor]:
        """Return `hidden`, `cos` and `sin` [1,S,w], and `visual_index` [V], on the device."""
        own = self.on_device
        if own is None:
            cos, sin = map(backend.tensor, rotary.tables(self.on_host.positions.rows))
            visual = backend.tensor(self.on_host.visual)
        else:
            cos, sin = own.rotary_tables(rotary)
            visual = own.visual
        return {"hidden": self.hidden, "cos": cos, "sin": sin, "visual_index": visual}


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
    table, counts = embedding([*chain.from_iterable(texts)]), [len(ids) for ids in texts]
    text_rows = len(table)
    if between_rows is not None:
        table = np.concatenate([table, embedding.named(between_rows)[None]])
    index = [
        own.index_on_device(backend) if pruned and _depends_on_tokens(layout, own) else None
        for layout, own in zip(layouts, encoded, strict=True)
    ]
    shown = [*_parts(layouts, encoded, index, pruned=pruned)]
    laid_out = visual, source, own_positions = _on_host(counts, shown)
    picture = np.concatenate([_NO_ROWS, *(np.full(len(part.rows), part.picture) for part in shown)])
    is_text = np.ones(text_rows + len(visual), np.bool_)
    is_text[visual] = False
    whole = np.empty(len(is_text), np.int64)
    whole[is_text] = np.arange(text_rows)
    firsts = len(table) + np.array([0, *accumulate(own.rows for own in encoded)])
    whole[visual] = np.where(source < 0, len(table) - 1, firsts[picture] + source)
    on_device = None
    if any(one is not None for one in index):
        from sinkprune.runtime.steps.rows_on_device import RowsOnDevice

        on_device = RowsOnDevice(backend, layouts, encoded, index, counts, picture, visual, own_positions)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        rows = backend.join(parts, whole)
        return rows if on_device is None else on_device.in_order(rows)

    def read() -> RowsOnHost:
        if on_device is None:
            return laid_out
        return _on_host(counts, [*_parts(layouts, encoded, [None] * len(encoded), pruned=pruned)])

    deepstack_inputs = {}
    if embedding.deepstack_width:
        zeros = backend.tensor(np.zeros((len(table), embedding.deepstack_width), table.dtype))
        deepstack_inputs["deepstack"] = joined([zeros, *(one.deepstack for one in encoded)])
    last = len(whole) - counts[-1]
    return PromptRows(
        hidden=joined([backend.tensor(table), *(one.embeddings for one in encoded)]),
        read=read,
        picture=picture,
        text=last + np.flatnonzero(np.array(texts[-1]) >= 0),
        actions=last + np.flatnonzero(np.array(texts[-1]) == PLACEHOLDER_ROW) - 1,
        length=len(whole),
        next_position=own_positions.next,
        on_device=on_device,
        deepstack_inputs=deepstack_inputs,
    )


class _Part(NamedTuple):
    """Rows of a picture that are adjacent in a prompt."""

    layout: VisualLayout
    picture: int
    """The picture's number."""
    rows: Array
    """The numbers of the rows within the picture; -1 is the end of a line."""
    tokens: Array
    """The token of each row, numbered through all groups."""


def _depends_on_tokens(layout: VisualLayout, own: EncodedPicture) -> bool:
    """Return whether kept tokens decide the positions of a picture's rows, or which part each is in."""
    return layout.places is not None or own.kept.shape[0] < layout.parts


def _parts(
    layouts: Sequence[VisualLayout],
    encoded: Sequence[EncodedPicture],
    index: Sequence[Tensor | None],
    *,
    pruned: bool,
) -> Iterator[_Part]:
    """Yield the parts of all pictures.

    Where tokens decide nothing, or their `index` is on the device, rows are as if each had the first token of its
    group.
    """
    for number, (layout, own, on_device) in enumerate(zip(layouts, encoded, index, strict=True)):
        rows = tokens = np.arange(own.rows) if pruned else layout.unpruned_rows
        if pruned and on_device is None and _depends_on_tokens(layout, own):
            tokens = own.source_tokens
        elif pruned:
            tokens = np.broadcast_to(own.first_tokens, own.kept.shape).ravel()
        if layout.parts == 1:
            yield _Part(layout, number, rows, tokens)
        else:
            for group in range(layout.parts):
                inside = tokens // layout.tokens == group
                yield _Part(layout, number, rows[inside], tokens[inside])


_NO_ROWS = np.arange(0)
"""A prompt without pictures has no visual rows."""


def _on_host(texts: Sequence[int], shown: Sequence[_Part]) -> RowsOnHost:
    """Return what is known of the parts `shown`, where `texts` are the lengths of the texts around them."""
    visual, place = [_NO_ROWS], 0
    for count, part in zip(texts, shown, strict=False):
        place += count
        visual.append(np.arange(place, place + len(part.rows)))
        place += len(part.rows)
    source = np.concatenate([_NO_ROWS, *(part.rows for part in shown)])
    return RowsOnHost(
        np.concatenate(visual), source, positions(texts, [(part.layout, part.tokens) for part in shown])
    )


def positions(texts: Sequence[int], pictures: Sequence[tuple[VisualLayout, Array]]) -> Positions:
    """Return the positions of a prompt's rows: `texts` are lengths, `pictures` are layouts with kept tokens [V].

    Text advances along all axes. A kept token of a picture has the position that it has unpruned, where the family
    gives tokens places of their own. New tokens continue after the largest position.
    """
    rows, starts, place, latest = [], list[int](), 0, 0
    for count, picture in zip_longest(texts, pictures):
        rows.append(np.arange(place, place + count)[None])
        place += count
        if picture is not None:
            layout, tokens = picture
            starts.append(place)
            if layout.places is None:
                rows.append(np.arange(place, place + len(tokens))[None])
                place += len(tokens)
            else:
                rows.append(place + layout.places[:, tokens])
                latest = max(latest, place + int(layout.places.max()) + 1)
                place += layout.extent
    axes = max(map(len, rows))
    joined = np.concatenate([np.broadcast_to(part, (axes, part.shape[1])) for part in rows], axis=1)
    return Positions(joined, max(place, latest), starts)
