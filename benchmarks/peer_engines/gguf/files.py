"""llama.cpp's file format: one written tensor by tensor, and what is read of one and made of it.

llama.cpp's own converter knows neither the small tokenizer nor LLaVA's tower in Hugging Face format, so the files of
decoders and towers are written here. Tokens are bare numbers: the ids are made outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sinkprune.contract.precision import Array

MOSTLY_BF16 = 32
"""As llama.cpp numbers what most of a file's tensors are."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


class GgufFile:
    """A file whose tensors are read, turned and written one at a time."""

    def __init__(self, path: Path, architecture: str) -> None:
        import gguf

        self.writer = gguf.GGUFWriter(path, architecture)
        self._types = gguf.GGMLQuantizationType
        self._tensors: list[tuple[str, tuple[int, ...], Any, Callable[[], Array]]] = []

    def add(self, name: str, shape: tuple[int, ...], read: Callable[[], Array]) -> None:
        """A tensor; matrices are kept in bf16, all else in fp32."""
        kind = self._types.BF16 if len(shape) == 2 else self._types.F32
        self._tensors.append((name, shape, kind, read))

    def add_table(self, name: str, shape: tuple[int, ...], read: Callable[[], Array]) -> None:
        """A matrix that nothing is multiplied with, in fp32: llama.cpp interpolates in no other type."""
        self._tensors.append((name, shape, self._types.F32, read))

    def write(self) -> None:
        """Write it all."""
        dtypes = {self._types.BF16: np.dtype(ml_dtypes.bfloat16), self._types.F32: np.dtype(np.float32)}
        for name, shape, kind, _ in self._tensors:
            size = int(np.prod(shape)) * dtypes[kind].itemsize
            self.writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_ti_data_to_file()
        for _, shape, kind, read in self._tensors:
            self.writer.write_tensor_data(read().reshape(shape).astype(dtypes[kind]).view(np.uint8))
        self.writer.close()


def add_vocabulary(writer: Any, size: int) -> None:
    """Control tokens, bytes, and numbers: what is fed are ids, and answers are never read."""
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
    """Bytes of a decoder's file that a token behind the first reads: all but an embedding table that is no head."""
    import gguf

    tensors = gguf.GGUFReader(path).tensors
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    return sum(tensor.n_bytes for tensor in tensors if tied or not re.match(r"token_embd\.", tensor.name))


def quantise(source: Path, target: Path, kind: int, threads: int) -> int:
    """llama.cpp's own rounding of a file, to a number of its `llama_ftype`; returns 0 if all went well."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = kind, threads
    code: int = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings)
    return code
