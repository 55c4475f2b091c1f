"""Builds models in OpenVINO's own format: functions inlined, caches as states, weights in a file next to the model.

OpenVINO's cache of compiled models is not used. OpenVINO 2026.4 loads a cached model with states and computes NaN.
The cache would save at most a quarter of the time to load, because matrices are packed again in either case.
"""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugin_graph import custom_nodes, read_model
from sinkprune.engines.progress import BuildProgress
from sinkprune.engines.targets import Builder, BuildJob, EngineFacts
from sinkprune.runtime.backends.openvino.backend import OpenVinoBackend
from sinkprune.runtime.system import trim_heap


class OpenVinoBuilder(Builder):
    """Builds for every device of OpenVINO. The models accept any shape."""

    target: Target = "openvino"
    suffix = ".xml"

    def __init__(self) -> None:
        super().__init__()
        self._backend = OpenVinoBackend(self.target, None, "fastest")
        self.library_version = self._backend.versions["openvino"]

    def check_bundle(self, bundle: Bundle) -> None:
        if bundle.manifest.cache != "in-place":
            raise EnginesError(
                f"'{bundle.path}' has caches that another must write, and openvino keeps its own. Export the bundle "
                "again with --dialect opset24."
            )

    def build(self, job: BuildJob, output: Path, progress: BuildProgress) -> EngineFacts:
        self._backend.write(job.model, output)
        trim_heap()
        return EngineFacts(dict.fromkeys(custom_nodes(read_model(job.model)), "function"))
