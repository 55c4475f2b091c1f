"""State dicts in PyTorch's format, read without PyTorch and without running what a pickle names.

Such a file is an uncompressed zip archive. `data.pkl` has the names, shapes and places of tensors, and each storage
is an entry of its own.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from sinkprune.contract.checks import format_value
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files import untrusted
from sinkprune.contract.precision import Array

_INDEX_BYTES = 1 << 20
"""The limit of `data.pkl`, a hundred times what a head has."""
_STORAGES: dict[str, tuple[str, Any]] = {
    "DoubleStorage": ("F64", np.float64),
    "FloatStorage": ("F32", np.float32),
    "HalfStorage": ("F16", np.float16),
    "BFloat16Storage": ("BF16", ml_dtypes.bfloat16),
}
"""The types of floats, by PyTorch's names: safetensors' name and numpy's type."""


class _Storage(NamedTuple):
    entry: str
    dtype: tuple[str, Any]
    length: int


class _Tensor(NamedTuple):
    storage: _Storage
    first: int
    shape: tuple[int, ...]

    def get_shape(self) -> list[int]:
        return [*self.shape]

    def get_dtype(self) -> str:
        return self.storage.dtype[0]


class TorchFile:
    """The floats of a state dict, with the methods of an open safetensors file.

    The prefix `module.` of a distributed training is left out of names.
    """

    def __init__(self, path: Path) -> None:
        """Open a file, whose path leads through no link; raises `CheckpointError`."""
        self._path = path
        with self._reading():
            self._file = untrusted.open_regular(path, follow_links=False)
            try:
                self._archive = zipfile.ZipFile(self._file)
                self._tensors = self._read_index()
            except BaseException:
                self._file.close()
                raise

    def close(self) -> None:
        self._file.close()

    def keys(self) -> Sequence[str]:
        return [*self._tensors]

    def get_slice(self, name: str) -> _Tensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> Array:
        """Return the values of a tensor; raises `CheckpointError`."""
        storage, first, shape = self._tensors[name]
        dtype = np.dtype(storage.dtype[1])
        with self._reading():
            data = self._archive.read(storage.entry)
            values: Array = np.frombuffer(data, dtype, prod(shape), first * dtype.itemsize)
        return values.reshape(shape)

    def _read_index(self) -> dict[str, _Tensor]:
        entries = {entry.filename: entry for entry in self._archive.infolist()}
        (index,) = (name for name in entries if name.endswith("/data.pkl"))
        if entries[index].file_size > _INDEX_BYTES:
            raise ValueError(f"its index has {entries[index].file_size} bytes, expected at most {_INDEX_BYTES}")
        order = index.replace("data.pkl", "byteorder")
        if order in entries and self._archive.read(order) != b"little":
            raise ValueError("its numbers are not little-endian")
        with closing(self._archive.open(index)) as pickled:
            found = _Index(pickled, index.removesuffix(".pkl")).load()
        if not isinstance(found, dict) or not all(isinstance(one, _Tensor) for one in found.values()):
            raise ValueError("it is no dict of tensors")
        for storage, first, shape in found.values():
            entry, size = entries[storage.entry], np.dtype(storage.dtype[1]).itemsize
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != storage.length * size:
                raise ValueError(f"its storage '{storage.entry}' has {entry.file_size} bytes")
            if first < 0 or first + prod(shape) > storage.length:
                raise ValueError(f"a tensor of shape {[*shape]} exceeds its storage")
        return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # A damaged archive or pickle may raise any error.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointError(
                f"'{self._path}' is no state dict of floats as torch.save writes it: {reason}. Download it again."
            ) from error


class _Index(pickle.Unpickler):
    """Reads an index into places of tensors. It rejects whatever else a pickle may name."""

    def __init__(self, file: Any, folder: str) -> None:
        super().__init__(file)
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise ValueError(f"it names {format_value(f'{module}.{name}')}")

    def persistent_load(self, saved: Any) -> _Storage:
        _, dtype, key, _, count = saved
        return _Storage(f"{self._folder}/{key}", dtype, count)


def _tensor(storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    if strides != tuple(prod(shape[axis + 1 :]) for axis in range(len(shape))):
        raise ValueError(f"a tensor of shape {[*shape]} has the strides {[*strides]}, and its rows are not in order")
    return _Tensor(storage, first, shape)
