"""Graphs of a bundle, or parts of them, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sinkprune.contract.errors import BackendError
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, words

_DOING = "sinkprune-calibrate quantize"


class Session:
    """A graph whose weights lie in `folder`.

    States stay floats in front of quantised weights: rounding them too is a choice of an engine, not of the weights.
    """

    def __init__(self, graph: ir.Graph, version: int, folder: Path, threads: int) -> None:
        """Raises `BackendError`. `version` is that of the file's intermediate representation."""
        ort = import_onnxruntime(_DOING)
        self.name = str(graph.name)
        options = session_options(ort)
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        data = ir.to_proto(ir.Model(graph, ir_version=version)).SerializeToString()
        try:
            self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            # onnxruntime has no common base class for its errors.
            raise BackendError(f"onnxruntime cannot load graph '{self.name}': {words(error)}") from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name, from all inputs by name; raises `BackendError`."""
        given: dict[str, Any] = {name: array for name, array in inputs.items() if name in self._inputs}
        try:
            found = self._session.run(self._outputs, given)
        except Exception as error:
            raise BackendError(
                f"graph '{self.name}' failed in onnxruntime: {words(error)}. If memory ran out, end other programs; "
                "if not, export the bundle again."
            ) from error
        return dict(zip(self._outputs, found, strict=True))
