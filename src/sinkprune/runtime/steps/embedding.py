"""The LLM's embedding table, read row by row from its file, and the learned rows of the same file.

A request reads few rows, and a robot has no gigabyte to spare for the whole table. So only a digest of each row stays
in memory, and each row that is read is compared with its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import DTYPES, Array, PrecisionName

_DTYPES = {"F32": "fp32", "F16": "fp16"}
_TABLE = "weight"
# The file begins with the length of the header.
_LENGTH_BYTES = 8
_HEADER_BYTES = 1 << 20
_DIGEST_BYTES = 16
_BLOCK_BYTES = 1 << 22


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    start: int


class Embedding:
    """The tensor `weight` [vocab,d] of a safetensors file, and its named rows [d].

    This class reads the format itself (https://github.com/huggingface/safetensors#format). The safetensors package
    maps the file, and a truncated mapped file ends the process.
    """

    def __init__(self, file: HeldFile, manifest: Manifest) -> None:
        """Read the whole file once; raises `BundleError` for a file without a matching table."""
        lm = manifest.language_model
        self._file, self._vocab, self._width = file, lm.vocab_size, lm.hidden_size
        self._dtype, self._deepstack_width = DTYPES[manifest.precision], manifest.deepstack_width
        self._tensors = _read_header(file, manifest.precision)
        self._table = self._tensor(_TABLE, (self._vocab, self._width))
        self._row_bytes = self._width * self._dtype.itemsize
        self._digests = b"".join(self._row_digests())
        learned = (name for name, tensor in self._tensors.items() if tensor.shape == (self._width,))
        self._learned = {name: file.read_at(self._tensors[name].start, self._row_bytes) for name in learned}

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
            data = self._file.read_at(self._table + token * self._row_bytes, self._row_bytes)
            if _digest(data) != self._digests[token * _DIGEST_BYTES : (token + 1) * _DIGEST_BYTES]:
                raise self._file.altered()
            rows[place] = np.frombuffer(data, self._dtype)
        return rows

    def deepstack_zeros(self, rows: int) -> dict[str, Array]:
        """Return the additional inputs of `decoder_0` for text rows, by name: zeros [rows,E], or no input."""
        return {"deepstack": np.zeros((rows, self._deepstack_width), self._dtype)} if self._deepstack_width else {}

    def named(self, name: str) -> Array:
        """Return the learned row [d] of that name, such as `image_newline`, in the table's type.

        Raises `BundleError` if there is none.
        """
        self._tensor(name, (self._width,))
        return np.frombuffer(self._learned[name], self._dtype)

    def _row_digests(self) -> Iterator[bytes]:
        rows = max(1, _BLOCK_BYTES // self._row_bytes)
        for first in range(0, self._vocab, rows):
            count = min(rows, self._vocab - first)
            block = memoryview(self._file.read_at(self._table + first * self._row_bytes, count * self._row_bytes))
            yield from (_digest(block[row * self._row_bytes :][: self._row_bytes]) for row in range(count))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the offset in the file of the tensor of that name and shape."""
        found = self._tensors.get(name)
        if found is None or found.shape != shape:
            state = f"of shape {list(found.shape)}" if found else "not there"
            raise BundleError(
                f"'{self._file.path}': its tensor '{name}' is {state}, expected {self._dtype.name}{list(shape)}. "
                "Export the bundle again."
            )
        return found.start


def _digest(row: bytes | memoryview) -> bytes:
    return hashlib.sha256(row).digest()[:_DIGEST_BYTES]


def _read_header(file: HeldFile, precision: PrecisionName) -> dict[str, _Tensor]:
    """Return the tensors of this precision by name; raises `BundleError` for a file that is not safetensors."""

    def refusal(reason: object) -> BundleError:
        return BundleError(f"'{file.path}' is no safetensors file: {reason}. Export or copy the bundle again.")

    length = int.from_bytes(file.read_at(0, min(_LENGTH_BYTES, file.size)), "little")
    first = _LENGTH_BYTES + length
    if length > _HEADER_BYTES or first > file.size:
        raise refusal(f"its header would have {length} of {file.size} bytes")
    try:
        header = parsed_json(file.read_at(_LENGTH_BYTES, length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__" or _DTYPES.get(entry["dtype"]) != precision:
                continue
            shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
            size = prod(shape) * DTYPES[precision].itemsize
            if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
                raise refusal(f"the tensor '{name}' has sizes that are no whole numbers")
            if end - start != size or first + end > file.size:
                raise refusal(f"the tensor '{name}' has {size} bytes, from {start} to {end} of {file.size - first}")
            tensors[name] = _Tensor(shape, first + start)
    except (UnreadableError, AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise refusal(f"its header is malformed ({error})") from error
    return tensors
