"""ONNX Runtime on the CPU with OpenVINO's vision tower.

OpenVINO computes many rows sooner, and a tower is many rows; ONNX Runtime computes the one row of a token sooner
where weights are int4.
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
"""The graph that OpenVINO runs."""


def open_backend(name: str, threads: int | None, compute: Compute, built: BuiltEngines | None) -> OrtBackend:
    """The backend `name`, which fits the engines `built`; raises `BackendError` and `EnginesError`."""
    return opened(OrtWithOpenVinoBackend, name, "CPUExecutionProvider", threads, compute, built)


class OrtWithOpenVinoBackend(OrtBackend):
    """`ort-cpu`, but for the graph `OF_OPENVINO`, which `openvino` runs. Tensors are OrtValues."""

    def __init__(self, name: str, provider: str, threads: int | None, compute: Compute) -> None:
        """Raises `BackendError` where one of the libraries is missing."""
        super().__init__(name, provider, threads, compute)
        # Where it is missing, the message names this backend.
        import_openvino(name)
        self._openvino = OpenVinoBackend("openvino", threads, compute)
        self.compute = f"{self.compute}{TOWER_IN}{self._openvino.compute}"
        self.versions |= self._openvino.versions
        self.turn = self._openvino.turn

    def load(self, model: Model) -> Engine:
        return self._vision(self._openvino.load(model)) if model.graph == OF_OPENVINO else super().load(model)

    def _vision(self, engine: Engine) -> Engine:
        """OpenVINO's `engine`, which takes and gives arrays, on tensors of this backend."""

        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
            # Of two C types that are int64, onnxruntime gives the one that openvino does not know.
            outputs = engine({name: array.view(array.dtype.name) for name, array in arrays.items()})
            return {name: self.tensor(array) for name, array in outputs.items()}

        return run
