"""ONNX Runtime on the CPU with OpenVINO's vision tower.

OpenVINO is faster on many rows, as a vision tower has. ONNX Runtime is faster on the single row of a token, with int4
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinkprune.runtime.backends import Engine
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.known import TOWER_IN, Compute
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from sinkprune.runtime.backends.openvino.library import import_openvino

OF_OPENVINO = "vision"
"""The graph that runs on OpenVINO."""


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """Open the backend `name` for the engines `built`, if any; raises `BackendError` and `EnginesError`."""
    return opened(OrtWithOpenVinoBackend, name, "CPUExecutionProvider", threads, compute, built)


class OrtWithOpenVinoBackend(OrtBackend):
    """`ort-cpu`, with the graph `OF_OPENVINO` on `openvino`. Tensors are OrtValues."""

    def __init__(self, name: str, provider: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where one of the libraries is missing."""
        super().__init__(name, provider, threads, compute)
        # Imported here, so that an error names this backend.
        import_openvino(name)
        self._openvino = OpenVinoBackend("openvino", threads, compute)
        self.compute = f"{self.compute}{TOWER_IN}{self._openvino.compute}"
        self.versions |= self._openvino.versions
        self.turn = self._openvino.turn

    def load(self, model: Model) -> Engine:
        return self._vision(self._openvino.load(model)) if model.graph == OF_OPENVINO else super().load(model)

    def _vision(self, engine: Engine) -> Engine:
        """Wrap OpenVINO's `engine`, which takes and returns arrays, for tensors of this backend."""

        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
            # Two C types are int64, and openvino does not accept the one that onnxruntime returns.
            outputs = engine({name: array.view(array.dtype.name) for name, array in arrays.items()})
            return {name: self.tensor(array) for name, array in outputs.items()}

        return run
