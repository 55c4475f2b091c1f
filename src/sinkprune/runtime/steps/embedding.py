"""The LLM's embedding table, read row by row from its file, and the learned rows of the same file.

A request reads few rows, and a robot has no gigabyte to spare for the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, TypedDict

import numpy as np

from sinkprune.contract.checks.fields import Bounds, SchemaError, from_json
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, Array, PrecisionName

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

    The rows are read through the held file. The safetensors package maps the file, and a truncated mapped file ends
    the process.
    """

    def __init__(self, file: HeldFile, manifest: Manifest) -> None:
        """Read the file's header; raises `BundleError` for a file without a matching table."""
        lm = manifest.language_model
        self._file, self._vocab, self._width = file, lm.vocab_size, lm.hidden_size
        self._precision, self._deepstack_width = manifest.precision, manifest.deepstack_width
        self._dtype = DTYPES[manifest.precision]
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

    def __call__(self, ids: Sequence[int]) -> Array:
        """Return rows [len(ids),d] in the table's type.

        Raises `BundleError` for an id without a row, and for a file that was altered.
        """
        rows = np.empty((len(ids), self._width), self._dtype)
        for place, token in enumerate(ids):
            if not 0 <= token < self._vocab:
                raise BundleError(
                    f"the tokenizer gave the token {token}, the embedding table in '{self._file.path}' has "
                    f"{self._vocab} rows. They do not belong together: export the bundle again."
                )
            rows[place] = self._row(self._table + token * self._width * self._dtype.itemsize)
        return rows

    def deepstack_zeros(self, rows: int) -> dict[str, Array]:
        """Return the additional inputs of `decoder_0` for text rows, by name: zeros [rows,E], or no input."""
        return {"deepstack": np.zeros((rows, self._deepstack_width), self._dtype)} if self._deepstack_width else {}

    def named(self, name: str) -> Array:
        """Return the learned row [d] of that name, such as `image_newline`, in the table's type.

        Raises `BundleError` if there is none.
        """
        return self._row(self._offset(name, (self._width,)))

    def _row(self, offset: int) -> Array:
        return np.frombuffer(self._file.read_at(offset, self._width * self._dtype.itemsize), self._dtype)

    def _offset(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the place in the file of the tensor of that name and shape."""
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
