"""Builds engines for ONNX Runtime with OpenVINO's vision tower: each library builds the graphs that it runs."""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.engines_manifest import Target
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import BuildJob, EngineFacts
from sinkprune.engines.targets.onnxruntime import OnnxRuntimeBuilder
from sinkprune.engines.targets.openvino import OpenVinoBuilder
from sinkprune.runtime.backends.openvino.library import import_openvino
from sinkprune.runtime.backends.openvino.with_onnxruntime import OF_OPENVINO


class OnnxRuntimeWithOpenVinoBuilder(OnnxRuntimeBuilder):
    """Builds as target onnxruntime does, but the graph `OF_OPENVINO` as target openvino does."""

    target: Target = "onnxruntime+openvino"

    def __init__(self) -> None:
        """Raise `BackendError` if one of the libraries is missing."""
        super().__init__()
        # If openvino is missing, the message names this target.
        import_openvino(self.target)
        self._openvino = OpenVinoBuilder()
        self.library_version = f"{self.library_version}+{self._openvino.library_version}"

    def file_name(self, graph: str) -> str:
        return self._openvino.file_name(graph) if graph == OF_OPENVINO else super().file_name(graph)

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        """Write the engine of one graph to the file `output`, with its weights next to it; raises `EnginesError`."""
        if job.model.graph == OF_OPENVINO:
            return self._openvino.build(job, output, progress)
        return super().build(job, output, progress)
