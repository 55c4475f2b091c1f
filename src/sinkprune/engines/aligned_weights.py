"""Aligns a model's weights to pages in the file that holds them.

ONNX Runtime writes prepacked matrices without gaps and maps them in the file. Its kernels expect the parts of a
matrix at multiples of 64 bytes: in a matrix that begins elsewhere they read other bytes, without an error. Its
documentation does not describe the entries that name prepacked matrices. So only those of tried versions are edited.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import BinaryIO

import onnx

from sinkprune.contract.errors import EnginesError

PREPACKED_IN = ((1, 31), (1, 32))
"""The versions of ONNX Runtime, major and minor, whose prepacked matrices were read, moved and computed with. Other
versions build engines without them."""

_PAGE = 4096
_PLAIN = {"location", "offset", "length", "checksum"}
_KEY = re.compile(r"prepacked_[0-9]+")
# ONNX Runtime writes 0 as the checksum, and compares none.
_FORM = re.compile(r"[^|;]+(?:\|[0-9]+;[0-9]+;0)+")
_PIECE = re.compile(r"(?<=\|)([0-9]+);([0-9]+)(?=;)")


def takes_prepacked(version: str) -> bool:
    """Return whether `version` of ONNX Runtime is one of `PREPACKED_IN`."""
    found = re.match(r"([0-9]+)\.([0-9]+)\.", version)
    return found is not None and (int(found[1]), int(found[2])) in PREPACKED_IN


def align_weights(file: Path) -> None:
    """Move every weight of the ONNX model `file` that is in a separate file, prepacked or not, to a page.

    Raises `EnginesError` if the model names prepacked matrices in another form than those of `PREPACKED_IN`.
    """
    model = onnx.load(file, load_external_data=False)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not external:
        return
    beside = file.with_name(f"{file.name}.data")
    _check(external, file, beside.stat().st_size)
    moved = beside.with_name(f"{beside.name}.new")
    with (
        beside.open("rb") as source,
        moved.open("wb") as target,
        mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for tensor in external:
            _move(tensor, data, target)
    moved.replace(beside)
    file.write_bytes(model.SerializeToString())


def _check(external: list[onnx.TensorProto], file: Path, size: int) -> None:
    """Raise `EnginesError` for external data of an unknown form, or beyond the `size` of its file."""
    for tensor in external:
        for entry in tensor.external_data:
            if entry.key in _PLAIN:
                continue
            pieces = [(int(start), int(length)) for start, length in _PIECE.findall(entry.value)]
            known = _KEY.fullmatch(entry.key) and _FORM.fullmatch(entry.value)
            if not known or any(start + length > size for start, length in pieces):
                raise EnginesError(
                    f"onnxruntime wrote the prepacked weight '{tensor.name}' of '{file.name}' in an unknown form: "
                    f"{entry.key} = {entry.value!r}, expected NAME|OFFSET;LENGTH;0 within {size} bytes. Run the "
                    f"bundle without engines, or install onnxruntime {'.'.join(map(str, PREPACKED_IN[-1]))}."
                )


def _move(tensor: onnx.TensorProto, data: mmap.mmap, target: BinaryIO) -> None:
    """Copy a tensor's bytes and those of its prepacked forms to `target`, and update their offsets."""
    entries = {entry.key: entry for entry in tensor.external_data}
    entries["offset"].value = str(_copied(data, int(entries["offset"].value), int(entries["length"].value), target))
    for key, entry in entries.items():
        if key not in _PLAIN:
            entry.value = _PIECE.sub(
                lambda piece: f"{_copied(data, int(piece[1]), int(piece[2]), target)};{piece[2]}", entry.value
            )


def _copied(data: mmap.mmap, offset: int, length: int, target: BinaryIO) -> int:
    """Append `length` bytes from `offset` on to `target`, at a page, and return their place."""
    target.write(bytes(-target.tell() % _PAGE))
    place = target.tell()
    with memoryview(data) as view:
        target.write(view[offset : offset + length])
    return place
