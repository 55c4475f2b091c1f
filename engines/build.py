"""Bundle to engines, all or nothing: written beside their place, then renamed."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import (
    ENGINES,
    FORMAT_VERSION,
    EnginesManifest,
    EngineSpec,
    Limits,
    OptimisationProfiles,
)
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.folders import check_outside, replacing
from sinkprune.contract.manifest_file import file_specs
from sinkprune.contract.memory_need import TOLD_BYTES, gigabytes
from sinkprune.contract.signature import Sign
from sinkprune.engines.optimisation_profiles import optimisation_profiles
from sinkprune.engines.preflight import OutOfMemoryError, check_memory, need_and_free
from sinkprune.engines.progress import SILENT, BuildProgress
from sinkprune.engines.targets import Builder, Job
from sinkprune.runtime.backends.models import Model

# What an engine takes beside its weights, generously; TensorRT-RTX's selects have 4 MB.
_CODE_BYTES = 16 << 20


def build_engines(
    bundle: Bundle,
    output: Path,
    builder: Builder,
    limits: Limits,
    *,
    force: bool = False,
    sign: Sign | None = None,
    progress: BuildProgress = SILENT,
) -> EnginesManifest:
    """Build every graph of `bundle` into the new folder `output`; with `force`, engines that are there are replaced.

    `sign` signs their manifest (`sinkprune.contract.signature.read_private_key`).
    What can be known to be wrong is found before anything is written; whatever goes wrong later, `output` is left
    as it was. Raises `EnginesError`, and `BundleError` for a bundle whose graphs the shapes cannot be told of.
    """
    check_outside(output, bundle.path, ENGINES)
    builder.check_bundle(bundle)
    profiles = optimisation_profiles(bundle.manifest, limits)
    memories = builder.memories()
    check_memory(bundle, profiles, memories)
    needed = sum(int(builder.disk_copies * bundle.manifest.weight_bytes(graph)) + _CODE_BYTES for graph in profiles)
    if needed >= TOLD_BYTES:
        largest = max(profiles, key=bundle.manifest.weight_bytes)
        told = need_and_free(bundle, largest, profiles[largest], memories) if memories else "building needs"
        progress.needs(f"{told}, and {gigabytes(needed)} of disk")
    way_out = "build a bundle with fewer methods and budgets"
    with replacing(output, ENGINES, needed, way_out, force=force) as root:
        engines = {}
        # One after the other: each may need most of the memory.
        for number, (graph, own) in enumerate(profiles.items()):
            progress.graph(graph, number, len(profiles))
            engines[graph] = _engine(bundle, graph, own, root, builder, progress)
        manifest = EnginesManifest(
            format_version=FORMAT_VERSION,
            sinkprune_version=version("sinkprune"),
            target=builder.target,
            library_version=builder.library_version,
            compute_capabilities=builder.compute_capabilities,
            bundle_sha256=bundle.sha256,
            checkpoint_sha256=bundle.manifest.checkpoint.config_sha256,
            plugins=builder.plugins,
            flags=builder.flags,
            limits=limits,
            engines=engines,
            files=file_specs(root),
        )
        ENGINES.write(root, manifest, sign)
    return manifest


def _engine(
    bundle: Bundle, graph: str, profiles: OptimisationProfiles, root: Path, builder: Builder, progress: BuildProgress
) -> EngineSpec:
    """Write the engine of `graph` below `root`."""
    file = f"engines/{graph}{builder.suffix}"
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    job = Job(Model.of_bundle(bundle, graph), profiles)
    start = time.perf_counter()
    try:
        built = builder.build(job, root / file, progress)
    except OutOfMemoryError as error:
        told = need_and_free(bundle, graph, profiles, builder.memories())
        raise EnginesError(f"{error} By estimate, {told}. End other programs, or use a machine with more.") from error
    seconds = round(time.perf_counter() - start, 3)
    return EngineSpec(file, built.optimisation_profiles, built.nodes, built.device_memory, seconds)
