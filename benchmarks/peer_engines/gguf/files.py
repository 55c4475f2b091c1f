"""llama.cpp's file format: files of a checkpoint's tensors, and the bytes that a token reads of one.

llama.cpp's own converter supports neither the small tokenizer nor LLaVA's tower in Hugging Face format. So this
package writes the files of decoders and towers. Tokens are bare numbers, because the ids are made outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import SafetensorsWeights

MOSTLY_BF16 = 32
"""llama.cpp's number for files whose tensors are mostly bf16."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class GgufFile:
    """A file of a checkpoint's tensors, which are read, changed and written one at a time."""

    def __init__(self, path: Path, architecture: str, checkpoint: Path) -> None:
        import gguf

        self.writer = gguf.GGUFWriter(path, architecture)
        self._checkpoint, self._types = checkpoint, gguf.GGMLQuantizationType
        self._tensors: list[tuple[str, tuple[int, ...], Any, Callable[[SafetensorsWeights], Array]]] = []

    def add(
        self,
        name: str,
        source: str,
        shape: tuple[int, ...],
        *,
        source_shape: tuple[int, ...] | None = None,
        change: Callable[[Array], Array] = lambda array: array,
        fp32: bool = False,
    ) -> None:
        """Add the tensor `source` of the checkpoint; matrices in bf16 unless `fp32`, all else in fp32.

        `change` turns the tensor of `source_shape` (default: `shape`) into the one of `shape`.
        """
        kind = self._types.BF16 if len(shape) == 2 and not fp32 else self._types.F32
        self._tensors.append(
            (name, shape, kind, lambda weights: change(weights.tensor(source, source_shape or shape)))
        )

    def write(self) -> None:
        """Write the header and all tensors."""
        dtypes = {self._types.BF16: np.dtype(ml_dtypes.bfloat16), self._types.F32: np.dtype(np.float32)}
        for name, shape, kind, _ in self._tensors:
            size = int(np.prod(shape)) * dtypes[kind].itemsize
            self.writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        with closing(SafetensorsWeights(self._checkpoint)) as weights:
            for _, shape, kind, read in self._tensors:
                self.writer.write_tensor_data(read(weights).reshape(shape).astype(dtypes[kind]).view(np.uint8))
        self.writer.close()


def add_vocabulary(writer: Any, size: int) -> None:
    """Add control tokens, bytes, and numbers. Prompts are ids and answers are never decoded."""
    import gguf

    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *_BYTES]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * len(_BYTES)]
    left = size - len(tokens)
    tokens += [f"token{number}" for number in range(left)]
    types += [kinds.NORMAL] * left
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def matrix_bytes(path: Path) -> int:
    """Return the bytes that a token after the first reads: all but an embedding table that is no head."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    return sum(tensor.n_bytes for tensor in tensors if tied or not re.match(r"token_embd\.", tensor.name))
