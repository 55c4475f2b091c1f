"""Optimised graphs for ONNX Runtime, alone or with OpenVINO's tower.

They have operators and memory layouts for this machine's processor, and load only in this version of onnxruntime.
They hold each matrix twice, as it is and prepacked. A session maps the prepacked matrices, so it loads quickly and
processes share them. Versions whose prepacked form was never tried pack matrices when they load: ONNX Runtime does
not document the form, and its kernels read other bytes, without an error, where a part is not at a multiple of 64.
"""

from __future__ import annotations

import mmap
import platform
import re
from pathlib import Path
from typing import BinaryIO

import onnx

from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugin_graph import custom_nodes, read_model
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import Builder, BuildJob, EngineFacts
from sinkprune.engines.targets.openvino import OpenVinoBuilder
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, session_path, words
from sinkprune.runtime.backends.openvino.backend import OF_OPENVINO, import_openvino
from sinkprune.runtime.processor import instructions
from sinkprune.runtime.system import trim_heap, usable_cores

_PROVIDER = "CPUExecutionProvider"
# Smaller tensors stay in the model's own file.
_EXTERNAL_BYTES = "1024"
PREPACKED_IN = ((1, 31), (1, 32))
"""The versions of ONNX Runtime, major and minor, whose prepacked matrices were read, moved and computed with. Other
versions build engines without them."""

_PAGE = 4096
_PLAIN = {"location", "offset", "length", "checksum"}
_KEY = re.compile(r"prepacked_[0-9]+")
# ONNX Runtime writes 0 as the checksum, and compares none.
_FORM = re.compile(r"[^|;]+(?:\|[0-9]+;[0-9]+;0)+")
_PIECE = re.compile(r"(?<=\|)([0-9]+);([0-9]+)(?=;)")


class OnnxRuntimeBuilder(Builder):
    """Builds for ONNX Runtime on the CPU. The models accept any shape."""

    target: Target = "onnxruntime"
    suffix = ".onnx"

    def __init__(self) -> None:
        super().__init__()
        self._ort = import_onnxruntime(self.target)
        self.library_version = self._ort.__version__
        self._prepacks = takes_prepacked(self.library_version)
        self._warned = self._prepacks
        self.flags = {
            "provider": _PROVIDER,
            "graph_optimization_level": "ORT_ENABLE_ALL",
            "machine": platform.machine(),
            "instructions": instructions(),
        }

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        if not self._warned:
            self._warned = True
            progress.report(
                f"onnxruntime {self.library_version} was never tried with prepacked weights: these engines hold "
                "none and pack them at every load"
            )
        model = read_model(job.model)
        options = session_options(self._ort)
        options.intra_op_num_threads = usable_cores()
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = session_path(output)
        # The model holds the name of a file in its own folder.
        entry = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{entry}_file_name", f"{output.name}.data")
        options.add_session_config_entry(f"{entry}_min_size_in_bytes", _EXTERNAL_BYTES)
        prepacked = "1" if self._prepacks else "0"
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", prepacked)
        # ONNX Runtime would make a file that no group may write, whatever the umask allows.
        output.touch()
        with job.model.by_path() as path:
            source = session_path(path)
            try:
                # The fallback would try the same again, and print that on stdout.
                self._ort.InferenceSession(source, options, providers=[_PROVIDER], enable_fallback=0)
            except Exception as error:
                # onnxruntime has no common base class for its errors.
                raise EnginesError(
                    f"onnxruntime cannot optimise graph '{job.model.graph}': {words(error)}"
                ) from error
        trim_heap()
        align_weights(output)
        # ONNX Runtime inlines every function.
        return EngineFacts(dict.fromkeys(custom_nodes(model), "function"))


class OnnxRuntimeWithOpenVinoBuilder(OnnxRuntimeBuilder):
    """Builds as target onnxruntime does, but the graphs `OF_OPENVINO` as target openvino does."""

    target: Target = "onnxruntime+openvino"

    def __init__(self) -> None:
        super().__init__()
        # If openvino is missing, the message names this target.
        import_openvino(self.target)
        self._openvino = OpenVinoBuilder()
        self.library_version = f"{self.library_version}+{self._openvino.library_version}"

    def file_name(self, graph: str) -> str:
        return self._openvino.file_name(graph) if graph in OF_OPENVINO else super().file_name(graph)

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        if job.model.graph in OF_OPENVINO:
            return self._openvino.build(job, output, progress)
        return super().build(job, output, progress)


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
