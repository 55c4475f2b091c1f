"""Bundle to engines, all or nothing: written beside their place, then renamed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import (
    ENGINES,
    FORMAT_VERSION,
    EnginesManifest,
    EngineSpec,
    Limits,
    Range,
    write_engines_manifest,
)
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.folders import check_replaceable, install, staging
from sinkprune.contract.manifest import MANIFEST
from sinkprune.contract.manifest_file import file_specs, sha256
from sinkprune.engines.limits import profiles
from sinkprune.engines.preflight import OutOfMemoryError, check_memory, need_and_free, weight_bytes
from sinkprune.engines.progress import BuildProgress, SilentProgress
from sinkprune.engines.targets import Builder, Job

# What a plan takes beside its weights, generously; TensorRT-RTX's selects have 4 MB.
_PLAN_BYTES = 16 << 20

_Profiles = dict[str, dict[str, Range]]


def build_engines(
    bundle: Bundle,
    output: Path,
    builder: Builder,
    limits: Limits,
    *,
    force: bool = False,
    progress: BuildProgress | None = None,
) -> EnginesManifest:
    """Build every graph of `bundle` into the new folder `output`; with `force` engines there are replaced.

    What can be known to be wrong is found before anything is written; whatever goes wrong later, `output` is left
    as it was. Raises `EnginesError`.
    """
    check_replaceable(output, ENGINES, force=force)
    builder.check_bundle(bundle)
    shapes = {graph: profiles(bundle.manifest, limits, graph) for graph in bundle.manifest.graphs}
    check_memory(bundle, shapes, builder.memories())
    needed = sum(weight_bytes(bundle, graph) + _PLAN_BYTES for graph in shapes)
    with staging(output, ENGINES, needed, "build a bundle with fewer methods and budgets") as root:
        writer = _Writer(bundle, root, builder, progress or SilentProgress())
        engines = writer.engines(shapes)
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        manifest = EnginesManifest(
            format_version=FORMAT_VERSION,
            sinkprune_version=version("sinkprune"),
            target=builder.target,
            library_version=builder.library_version,
            compute_capabilities=builder.compute_capabilities,
            bundle_sha256=sha256(bundle.file(MANIFEST)),
            checkpoint_sha256=bundle.manifest.checkpoint.config_sha256,
            plugins=builder.plugins,
            flags=builder.flags,
            limits=limits,
            engines=engines,
            files=file_specs(root, files),
        )
        write_engines_manifest(root, manifest)
        # Hours may have passed: what came to stand there meanwhile is not ours to replace.
        check_replaceable(output, ENGINES, force=force)
        install(root, output)
    return manifest


@dataclass(frozen=True)
class _Writer:
    """Writes engines below `root`."""

    bundle: Bundle
    root: Path
    builder: Builder
    progress: BuildProgress

    def engines(self, shapes: dict[str, _Profiles]) -> dict[str, EngineSpec]:
        """One engine after the other: each may need most of the memory."""
        specs = {}
        for number, (graph, ranges) in enumerate(shapes.items()):
            self.progress.graph(graph, number, len(shapes))
            specs[graph] = self._engine(graph, ranges)
        return specs

    def _engine(self, graph: str, ranges: _Profiles) -> EngineSpec:
        file = f"engines/{graph}{self.builder.suffix}"
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        job = Job(graph, self.bundle.graph_path(graph), self.bundle.manifest.graphs[graph], ranges)
        start = time.perf_counter()
        try:
            built = self.builder.build(job, self.root / file, self.progress)
        except OutOfMemoryError as error:
            told = need_and_free(self.bundle, graph, ranges, self.builder.memories())
            raise EnginesError(
                f"{error} By estimate, {told}. End other programs, or use a machine with more."
            ) from error
        seconds = round(time.perf_counter() - start, 3)
        return EngineSpec(file, built.profiles, built.nodes, built.device_memory, seconds)
