"""Models in OpenVINO's own format: functions inlined, caches as states, weights in a file beside.

They are not what OpenVINO caches of a compiled model: with states in it, 2026.4 reads that back and computes NaN, and
it would save a quarter of the time to load at most, because matrices are packed anew in either case.
"""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Realisation, Target
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugin_graph import custom_nodes, read_model
from sinkprune.engines.preflight import COPIES, Memory, system_memory
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import Built, Job
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from sinkprune.runtime.system.heap import trim_heap


class OpenVinoBuilder:
    """Builds for OpenVINO, on whatever device it computes: its own format is the same for all."""

    target: Target = "openvino"
    compute_capabilities: tuple[int, ...] = ()
    disk_copies = COPIES["openvino"].disk

    def __init__(self) -> None:
        """Raises `BackendError` if openvino is missing."""
        self._backend = OpenVinoBackend(self.target, None, "fastest")
        self.library_version: str = self._backend.versions["openvino"]
        self.plugins: dict[str, str] = {}
        self.flags: dict[str, str] = {}

    def file_name(self, graph: str) -> str:
        return f"{graph}.xml"

    def check_bundle(self, bundle: Bundle) -> None:
        """Refuse a bundle whose decoder does not keep its caches; raises `EnginesError`."""
        if bundle.manifest.cache != "in-place":
            raise EnginesError(
                f"'{bundle.path}' has caches that another must write, and openvino keeps its own. Export the bundle "
                "again with --dialect opset24."
            )

    def memories(self) -> tuple[Memory, ...]:
        """The machine's memory, of which a graph takes that of its weights, and of what is written."""
        return system_memory(COPIES[self.target].memory, activations=False)

    def build(self, job: Job, output: Path, progress: BuildProgress) -> Built:
        """Write the model of one graph to the file `output`, its weights beside it; raises `BackendError`.

        It takes any shape, and `progress` is told nothing: it is done in one call.
        """
        self._backend.write(job.model, output)
        trim_heap()
        nodes: dict[str, Realisation] = dict.fromkeys(custom_nodes(read_model(job.model)), "function")
        return Built(optimisation_profiles={}, nodes=nodes, device_memory=None)
