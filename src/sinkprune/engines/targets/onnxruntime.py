"""Optimised graphs for ONNX Runtime, alone or with OpenVINO's tower.

They have operators and memory layouts for this machine's processor. They load only in this version of onnxruntime and
this provider. They hold each matrix twice, as it is and prepacked for that processor. A session maps the
prepacked matrices, so it loads quickly and processes share them. Versions of onnxruntime whose prepacked form was
never tried pack matrices when they load.
"""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.bundle import Realisation, Target
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugin_graph import align_weights, custom_nodes, read_model, takes_prepacked
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import Builder, BuildJob, EngineFacts
from sinkprune.engines.targets.openvino import OpenVinoBuilder
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, session_path, words
from sinkprune.runtime.backends.openvino.backend import OF_OPENVINO
from sinkprune.runtime.backends.openvino.devices import import_openvino
from sinkprune.runtime.system import architecture, instructions, trim_heap, usable_cores

_PROVIDER = "CPUExecutionProvider"
# Smaller tensors stay in the model's own file.
_EXTERNAL_BYTES = "1024"


class OnnxRuntimeBuilder(Builder):
    """Builds for ONNX Runtime on the CPU. The models accept any shape."""

    target: Target = "onnxruntime"
    suffix = ".onnx"

    def __init__(self) -> None:
        """Raise `BackendError` if onnxruntime is missing."""
        super().__init__()
        self._ort = import_onnxruntime(self.target)
        self.library_version = self._ort.__version__
        self._prepacks = takes_prepacked(self.library_version)
        self._warned = self._prepacks
        self.flags = {
            "provider": _PROVIDER,
            "graph_optimization_level": "ORT_ENABLE_ALL",
            "machine": architecture(),
            "instructions": instructions(),
        }

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        """Write the optimised model of one graph to `output`, with its weights next to it; raises `EnginesError`."""
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
        nodes: dict[str, Realisation] = dict.fromkeys(custom_nodes(model), "function")
        return EngineFacts(optimisation_profiles={}, nodes=nodes, device_memory=None)


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
