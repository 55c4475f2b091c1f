"""The LLM's embedding table, read row by row: the table itself stays in the file. Learned rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from sinkprune.contract.precision import Array


class Embedding:
    """`weight` [vocab,d] of a safetensors file, and the rows [d] that stand in it under names of their own."""

    def __init__(self, path: Path) -> None:
        self._file = _open(path)
        self._rows = self._file.get_slice("weight")

    def __call__(self, ids: Sequence[int]) -> Array:
        """[len(ids),d] in the table's type."""
        return np.concatenate([self._rows[0:0], *(self._rows[token : token + 1] for token in ids)])

    def named(self, name: str) -> Array:
        """[d] in the table's type: the learned row that bears a name of its own, such as `image_newline`."""
        row: Array = self._file.get_tensor(name)
        return row


def _open(path: Path) -> Any:
    # safetensors has no types
    return safe_open(path, framework="np")
