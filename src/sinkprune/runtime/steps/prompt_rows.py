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


class VisualRows(NamedTuple):
    """Where a prompt's V visual rows stand, and where they come from."""

    visual: Array
    """[V] int64: the rows that are visual tokens, ascending."""
    source: Array
    """[V] int64: the place of each visual row among its picture's rows."""


@dataclass(frozen=True)
class PromptRows:
    """All S rows of a prompt, of which V are visual."""

    hidden: Tensor
    """[1,S,d] float on the device: the embeddings of all rows."""
    on_host: Callable[[], VisualRows]
    """Returns `visual_rows`, which may have to be read from the device."""
    picture: Array
    """[V] int64: the picture's number of each visual row."""
    text: Array
    """[L] int64: the text rows after the last picture, without a policy's rows that are no text."""
    actions: Array
    """[A] int64: the rows that become actions, each before its placeholder; only in some policies."""
    positions: Positions
    """With `on_device`, those of other tokens in some rows."""
    on_device: RowsOnDevice | None = None
    """The order and positions of rows that only the device knows; None if the host knows all."""
    deepstack_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """[1,S,E] float on the device, by name: the additional inputs of `decoder_0`, for models with DeepStack."""

    @cached_property
    def length(self) -> int:
        """S, the number of rows."""
        return self.positions.rows.shape[-1]

    @cached_property
    def visual_rows(self) -> VisualRows:
        """Where visual rows stand, and where they come from; called in the backend's `turn`."""
        return self.on_host()

    def state(self, backend: Backend, rotary: Rotary) -> dict[str, Tensor]:
        """Return `hidden`, `cos` and `sin` [1,S,w], and `visual_index` [V], on the device."""
        own = self.on_device
        if own is None:
            cos, sin = map(backend.tensor, rotary.tables(self.positions.rows))
            visual = backend.tensor(self.visual_rows.visual)
        else:
            cos, sin = own.rotary_tables(rotary, self.positions.rows)
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
    unread = [
        # Where rows are adjacent and positions are their numbers, nothing depends on tokens.
        own.unread(backend) if pruned and (layout.parts > 1 or layout.places is not None) else None
        for layout, own in zip(layouts, encoded, strict=True)
    ]
    shown = [*_parts(layouts, encoded, unread, pruned=pruned)]
    pieces = [(part.layout, part.tokens) for part in shown]
    visual, source = laid_out = _visual_rows(counts, shown)
    picture = np.concatenate([_NO_ROWS, *(np.full(len(part.rows), part.picture) for part in shown)])
    is_text = np.ones(text_rows + len(visual), np.bool_)
    is_text[visual] = False
    whole = np.empty(len(is_text), np.int64)
    whole[is_text] = np.arange(text_rows)
    firsts = len(table) + np.array([0, *accumulate(own.rows for own in encoded)])
    whole[visual] = np.where(source < 0, len(table) - 1, firsts[picture] + source)
    on_device = None
    if any(kept is not None for kept in unread):
        from sinkprune.runtime.steps.rows_on_device import RowsOnDevice, UnreadRows

        pictures, starts, end = list[UnreadRows](), _starts(counts, pieces)[1::2], 0
        for number, (layout, own, kept) in enumerate(zip(layouts, encoded, unread, strict=True)):
            parts, rows = slice(end, end + layout.parts), np.flatnonzero(picture == number)
            if kept is not None:
                one = UnreadRows(layout, kept, own.first_tokens, visual[rows], rows, starts[parts], counts[parts][1:])
                pictures.append(one)
            end = parts.stop
        on_device = RowsOnDevice(backend, len(whole), visual, pictures)

    def joined(parts: Sequence[Tensor]) -> Tensor:
        rows = backend.join(parts, whole)
        return rows if on_device is None else on_device.in_order(rows)

    def on_host() -> VisualRows:
        if on_device is None:
            return laid_out
        return _visual_rows(counts, [*_parts(layouts, encoded, [None] * len(encoded), pruned=pruned)])

    deepstack_inputs = {}
    if embedding.deepstack_width:
        zeros = backend.tensor(np.zeros((len(table), embedding.deepstack_width), table.dtype))
        deepstack_inputs["deepstack"] = joined([zeros, *(one.deepstack for one in encoded)])
    last = len(whole) - counts[-1]
    return PromptRows(
        hidden=joined([backend.tensor(table), *(one.embeddings for one in encoded)]),
        on_host=on_host,
        picture=picture,
        text=last + np.flatnonzero(np.array(texts[-1]) >= 0),
        actions=last + np.flatnonzero(np.array(texts[-1]) == PLACEHOLDER_ROW) - 1,
        positions=positions(counts, pieces),
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


def _parts(
    layouts: Sequence[VisualLayout],
    encoded: Sequence[EncodedPicture],
    unread: Sequence[Tensor | None],
    *,
    pruned: bool,
) -> Iterator[_Part]:
    """Yield the parts of all pictures; those of `unread` as if each row had the first token of its group."""
    for number, (layout, own, kept) in enumerate(zip(layouts, encoded, unread, strict=True)):
        rows = tokens = np.arange(own.rows) if pruned else layout.unpruned_rows
        if pruned and kept is not None:
            tokens = np.broadcast_to(own.first_tokens, kept.shape).ravel()
        elif pruned and (layout.parts > 1 or layout.places is not None):
            tokens = own.source_tokens
        if layout.parts == 1:
            yield _Part(layout, number, rows, tokens)
        else:
            for group in range(layout.parts):
                inside = tokens // layout.tokens == group
                yield _Part(layout, number, rows[inside], tokens[inside])


_NO_ROWS = np.arange(0)
"""A prompt without pictures has no visual rows."""


def _visual_rows(texts: Sequence[int], shown: Sequence[_Part]) -> VisualRows:
    """Return the rows of the parts `shown`, where `texts` are the lengths of the texts around them."""
    visual, place = [_NO_ROWS], 0
    for count, part in zip(texts, shown, strict=False):
        place += count
        visual.append(np.arange(place, place + len(part.rows)))
        place += len(part.rows)
    return VisualRows(np.concatenate(visual), np.concatenate([_NO_ROWS, *(part.rows for part in shown)]))


def _starts(texts: Sequence[int], pictures: Sequence[tuple[VisualLayout, Array]]) -> list[int]:
    """Return the first position of each text and each picture of `positions`, in their order, and the next one."""
    lengths = [0]
    for count, picture in zip_longest(texts, pictures):
        lengths.append(count)
        if picture is not None:
            layout, tokens = picture
            lengths.append(len(tokens) if layout.places is None else layout.extent)
    return [*accumulate(lengths)]


def positions(texts: Sequence[int], pictures: Sequence[tuple[VisualLayout, Array]]) -> Positions:
    """Return the positions of a prompt's rows: `texts` are lengths, `pictures` are layouts with kept tokens [V].

    Text advances along all axes. A kept token of a picture has the position that it has unpruned, where the family
    gives tokens places of their own. New tokens continue after the largest position.
    """
    starts = _starts(texts, pictures)
    rows, latest = [], starts[-1]
    for number, count in enumerate(texts):
        rows.append(np.arange(starts[2 * number], starts[2 * number] + count)[None])
        if number < len(pictures):
            (layout, tokens), start = pictures[number], starts[2 * number + 1]
            if layout.places is None:
                rows.append(np.arange(start, start + len(tokens))[None])
            else:
                rows.append(start + layout.places[:, tokens])
                latest = max(latest, start + int(layout.places.max()) + 1)
    axes = max(map(len, rows))
    return Positions(np.concatenate([np.broadcast_to(part, (axes, part.shape[1])) for part in rows], axis=1), latest)
