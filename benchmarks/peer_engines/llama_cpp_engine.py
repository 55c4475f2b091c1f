"""llama.cpp through llama-cpp-python, built for this processor: its decoder, and its tower through mtmd."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from peer_engines.checkpoint import chat_text, random_picture
from peer_engines.engine import Form, Loaded, NotRunError, Question, Timing, need
from peer_engines.gguf import clip_tower, qwen3_tower
from peer_engines.gguf.decoder import write_decoder
from peer_engines.gguf.files import matrix_bytes
from sinkprune.export.checkpoint.folder import read_json

# Bits a weight, and llama.cpp's `llama_ftype`; None for the form that the others are made of.
_FORMS: dict[str, tuple[float, int | None]] = {"BF16": (16, None), "Q8_0": (8.5, 7), "Q4_0": (4.5, 2)}
_TOWERS: dict[str, Any] = {"llava": clip_tower, "qwen3_vl": qwen3_tower}
"""The modules that write towers, by `model_type`."""
_TOWER, _DECODER = "tower-BF16.gguf", "BF16.gguf"
_ROWS = 256
"""Rows of the cache for the text."""


def forms(config: Mapping[str, Any]) -> Sequence[Form]:
    """Return three roundings of the decoder; the tower is bf16 in all."""
    need("llama_cpp", "llama-cpp-python")
    need("gguf", "gguf")
    if config["model_type"] not in _TOWERS:
        raise NotRunError(f"only {' and '.join(_TOWERS)} are written as GGUF here (gguf/*_tower.py)")
    return [Form("llama_cpp", name, bits) for name, (bits, _) in _FORMS.items()]


def prepare(form: Form, place: Path) -> None:
    """Write the tower, and the decoder in bf16 or as rounded by llama.cpp."""
    folder, checkpoint, kind = place / "llama-cpp", place / "checkpoint", _FORMS[form.name][1]
    folder.mkdir(exist_ok=True)
    _make(folder / _TOWER, lambda path: _tower_module(checkpoint).write_tower(checkpoint, path))
    decoder = folder / f"{form.name}.gguf"
    if decoder.exists():
        return
    _make(folder / _DECODER, lambda path: write_decoder(checkpoint, path))
    if kind is not None:
        _make(decoder, lambda path: _rounded(folder / _DECODER, path, kind))


def _make(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file whole, unless it exists."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        write(partial)
        partial.rename(path)


def _rounded(source: Path, target: Path, kind: int) -> None:
    """Round a decoder to a `llama_ftype`."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = kind, 2
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
        raise NotRunError(f"llama.cpp could not make '{target.name}'")


def _tower_module(checkpoint: Path) -> Any:
    return _TOWERS[read_json(checkpoint, "config.json")["model_type"]]


def load(form: Form, place: Path, threads: int) -> Loaded:
    """Load decoder and tower; nothing is kept between two questions."""
    folder = place / "llama-cpp"
    model = _Model(folder / f"{form.name}.gguf", folder / _TOWER, threads, place / "checkpoint")
    # The instruction sets it was built for matter more than its version.
    import llama_cpp

    system = llama_cpp.llama_print_system_info().decode().strip()
    versions = {"llama-cpp-python": version("llama-cpp-python"), "system": system}
    return Loaded(model.answer, versions, matrix_bytes(folder / f"{form.name}.gguf"))


class _Model:
    """A decoder with its context, and the tower."""

    def __init__(self, decoder: Path, tower: Path, threads: int, checkpoint: Path) -> None:
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self._llama, self._mtmd = llama_cpp, mtmd_cpp
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self._model = _made(llama_cpp.llama_model_load_from_file(str(decoder).encode(), settings), decoder)
        config = read_json(checkpoint, "config.json")
        self._image = config["image_token_index" if "image_token_index" in config else "image_token_id"]
        least, most = _tower_module(checkpoint).visual_tokens(checkpoint)
        own = llama_cpp.llama_context_default_params()
        own.n_ctx = most + _ROWS
        own.n_batch = own.n_ctx
        own.n_threads = own.n_threads_batch = threads
        self._context = _made(llama_cpp.llama_init_from_model(self._model, own), decoder)
        tower_settings = mtmd_cpp.mtmd_context_params_default()
        tower_settings.use_gpu, tower_settings.n_threads = False, threads
        tower_settings.print_timings = False
        # The checkpoint's limits in place of llama.cpp's, which are for all models of a kind.
        tower_settings.image_min_tokens, tower_settings.image_max_tokens = least, most
        self._tower = _made(mtmd_cpp.mtmd_init_from_file(str(tower).encode(), self._model, tower_settings), tower)
        self._vocabulary = config["text_config"]["vocab_size"]
        self._batch = own.n_batch
        self._ids = llama_cpp.llama_batch_init(own.n_batch, 0, 1)
        self._checkpoint = checkpoint
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def answer(self, question: Question) -> Timing:
        """Answer a question with an empty cache."""
        picture = random_picture(question.seed, question.side)
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        start = time.perf_counter()
        before, after = self._words(question.text)
        with ExitStack() as held:
            chunk = self._chunk(picture, held)
            self._check(self._mtmd.mtmd_encode_chunk(self._tower, chunk))
            seen = time.perf_counter()
            place = ctypes.c_int32(self._decode(before, 0))
            states = self._mtmd.mtmd_get_output_embd(self._tower)
            self._check(
                self._mtmd.mtmd_helper_decode_image_chunk(
                    self._tower, self._context, chunk, states, place, 0, self._batch, ctypes.byref(place),
                    self._mtmd.mtmd_helper_post_decode_callback(0), None,
                )
            )  # fmt: skip
            rows = self._mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        position = self._decode(after, place.value)
        tokens = [self._likeliest()]
        times = [time.perf_counter()]
        while len(tokens) < question.new_tokens:
            position = self._decode(tokens[-1:], position)
            tokens.append(self._likeliest())
            times.append(time.perf_counter())
        return Timing.of(start, times, (seen - start) * 1e3, len(before) + rows + len(after), tokens)

    def _words(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids before the picture and after it."""
        ids = self._tokenizer.encode(chat_text(self._checkpoint, text)).ids
        place = ids.index(self._image)
        return ids[:place], ids[place + 1 :]

    def _chunk(self, picture: np.ndarray[Any, Any], held: ExitStack) -> Any:
        """Return the picture, resized and normalised by llama.cpp."""
        mtmd = self._mtmd
        height, width, _ = picture.shape
        pixels = picture.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, pixels)
        held.callback(mtmd.mtmd_bitmap_free, bitmap)
        chunks = mtmd.mtmd_input_chunks_init()
        held.callback(mtmd.mtmd_input_chunks_free, chunks)
        marker = mtmd.mtmd_default_marker()
        text = mtmd.mtmd_input_text(text=marker, text_len=len(marker), add_special=False, parse_special=True)
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        self._check(mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(text), bitmaps, 1))
        found = [mtmd.mtmd_input_chunks_get(chunks, at) for at in range(mtmd.mtmd_input_chunks_size(chunks))]
        kinds = [mtmd.mtmd_input_chunk_get_type(chunk) for chunk in found]
        return found[kinds.index(mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)]

    def _decode(self, ids: list[int], position: int) -> int:
        """Decode `ids` from a position on, and return the next position."""
        batch = self._ids
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at] = token, position + at
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, 0, at == len(ids) - 1
        self._check(self._llama.llama_decode(self._context, batch))
        return position + len(ids)

    def _likeliest(self) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def _check(self, code: int) -> None:
        if code:
            raise NotRunError(f"llama.cpp ended a call with {code}")


def _made(made: Any, path: Path) -> Any:
    if not made:
        raise NotRunError(f"llama.cpp does not load '{path.name}'")
    return made
