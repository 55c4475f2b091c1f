"""Models as ONNX Runtime's CPU provider optimises them when it loads one: done once, and ahead.

They hold operators and memory layouts chosen for this machine's processor, load in this version of onnxruntime, and
are not for another provider. They hold matrices twice, as they are and prepacked for that processor. A session maps
the prepacked ones, so that it loads at once and processes share them. Versions of onnxruntime whose prepacked form
was never tried pack matrices when they load.
"""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Realisation, Target
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.aligned_weights import align_weights, takes_prepacked
from sinkprune.engines.plugin_graph import custom_nodes, read_model
from sinkprune.engines.preflight import COPIES, Memory, system_memory
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import Built, Job
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, session_path, words
from sinkprune.runtime.system.cores import usable_cores
from sinkprune.runtime.system.heap import trim_heap
from sinkprune.runtime.system.processor import instructions, machine

_PROVIDER = "CPUExecutionProvider"
# Smaller tensors stay in the model's own file.
_EXTERNAL_BYTES = "1024"


class OnnxRuntimeBuilder:
    """Builds for ONNX Runtime on the CPU: models optimised for this machine's kind of processor."""

    target: Target = "onnxruntime"
    compute_capabilities: tuple[int, ...] = ()
    disk_copies = COPIES["onnxruntime"].disk

    def __init__(self) -> None:
        """Raises `BackendError` if onnxruntime is missing."""
        self._ort = import_onnxruntime(self.target)
        self.library_version: str = self._ort.__version__
        self.plugins: dict[str, str] = {}
        self._told = takes_prepacked(self.library_version)
        self.flags = {
            "provider": _PROVIDER,
            "graph_optimization_level": "ORT_ENABLE_ALL",
            "machine": machine(),
            "instructions": instructions(),
        }

    def file_name(self, graph: str) -> str:
        return f"{graph}.onnx"

    def check_bundle(self, bundle: Bundle) -> None:
        """ONNX Runtime takes every bundle."""

    def memories(self) -> tuple[Memory, ...]:
        """The machine's memory, of which ONNX Runtime takes 2.5 times the weights of a graph."""
        return system_memory(COPIES[self.target].memory, activations=False)

    def build(self, job: Job, output: Path, progress: BuildProgress) -> Built:
        """Write the optimised model of one graph to the file `output`, its weights beside it; raises `EnginesError`.

        The model takes any shape.
        """
        if not self._told:
            self._told = True
            progress.tell(
                f"onnxruntime {self.library_version} was never tried with prepacked weights: these engines hold "
                "none and pack them at every load"
            )
        model = read_model(job.model)
        options = session_options(self._ort)
        options.intra_op_num_threads = usable_cores()
        options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = session_path(output)
        # The name stands in the model, and is looked up beside it.
        entry = "session.optimized_model_external_initializers"
        options.add_session_config_entry(f"{entry}_file_name", f"{output.name}.data")
        options.add_session_config_entry(f"{entry}_min_size_in_bytes", _EXTERNAL_BYTES)
        prepacked = "1" if takes_prepacked(self.library_version) else "0"
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", prepacked)
        with job.model.by_path() as path:
            source = session_path(path)
            try:
                # It would try the same again, and say so on stdout.
                self._ort.InferenceSession(source, options, providers=[_PROVIDER], enable_fallback=0)
            except Exception as error:
                # onnxruntime has no common base class for its errors.
                raise EnginesError(
                    f"onnxruntime cannot optimise graph '{job.model.graph}': {words(error)}"
                ) from error
        trim_heap()
        align_weights(output)
        # It inlines every function.
        nodes: dict[str, Realisation] = dict.fromkeys(custom_nodes(model), "function")
        return Built(optimisation_profiles={}, nodes=nodes, device_memory=None)
