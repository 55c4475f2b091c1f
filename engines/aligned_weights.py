"""Where a model's weights begin in the file beside it: at the page, whoever wrote them.

ONNX Runtime 1.31 writes packed matrices one behind the other and maps them where they lie. Its kernels look for the
parts of one at multiples of 64 bytes: where a matrix does not begin at such a one, they compute with other bytes, and
nothing is said.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import BinaryIO

import onnx

_PAGE = 4096
# A packed matrix: KEY|OFFSET;LENGTH;CHECKSUM, with more of the last three behind further bars.
_PIECE = re.compile(r"(?<=\|)(\d+);(\d+)(?=;)")


def align_weights(file: Path) -> None:
    """Have every weight of the ONNX model `file` that lies in the file beside it, packed or not, begin at a page."""
    model = onnx.load(file, load_external_data=False)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not external:
        return
    beside = file.with_name(f"{file.name}.data")
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


def _move(tensor: onnx.TensorProto, data: mmap.mmap, target: BinaryIO) -> None:
    """Copy a tensor's bytes and those of its packed forms, and have it say where they are now."""
    entries = {entry.key: entry for entry in tensor.external_data}
    entries["offset"].value = str(_copied(data, int(entries["offset"].value), int(entries["length"].value), target))
    for key, entry in entries.items():
        if key.startswith("prepacked"):
            entry.value = _PIECE.sub(
                lambda piece: f"{_copied(data, int(piece[1]), int(piece[2]), target)};{piece[2]}", entry.value
            )


def _copied(data: mmap.mmap, offset: int, length: int, target: BinaryIO) -> int:
    """Where a copy of `length` bytes from `offset` on begins in `target`."""
    target.write(bytes(-target.tell() % _PAGE))
    place = target.tell()
    with memoryview(data) as view:
        target.write(view[offset : offset + length])
    return place
