"""Bundle to engines, all or nothing: built beside their place one by one, and put there when all are whole."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import (
    ASKED_LIMITS,
    BUNDLE_FOLDER,
    ENGINES,
    FORMAT_VERSION,
    EnginesManifest,
    EngineSpec,
    Limits,
    OptimisationProfiles,
)
from sinkprune.contract.errors import EnginesError, SinkpruneError
from sinkprune.contract.files.folders import (
    check_outside,
    check_replaceable,
    check_room,
    first_names,
    made_parents,
    replacing,
)
from sinkprune.contract.files.listed_files import remove_listed
from sinkprune.contract.files.manifest_file import file_specs, sha256
from sinkprune.contract.files.signature import Sign
from sinkprune.contract.files.untrusted import MANIFEST_BYTES, read_bytes
from sinkprune.contract.manifest import BESIDE_GRAPHS, BUNDLE, MANIFEST
from sinkprune.contract.system.memory_need import TOLD_BYTES, gigabytes
from sinkprune.engines.gate.checking import OPEN, Gate
from sinkprune.engines.optimisation_profiles import optimisation_profiles
from sinkprune.engines.preflight import OutOfMemoryError, check_memory, disk_bytes, need_and_free
from sinkprune.engines.progress import SILENT, BuildProgress
from sinkprune.engines.targets import Builder, Job
from sinkprune.engines.unfinished import Unfinished, unfinished
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.models import Model

# In the folder of an unfinished build: what the gate keeps.
_RECORDING = "recording"
# Other programs write too, and file systems keep some for themselves.
_FULL_BYTES = 4 << 20
_WAY_OUT = "build a bundle with fewer methods and budgets"


def build_engines(
    bundle: Bundle,
    output: Path,
    builder: Builder,
    limits: Limits,
    *,
    asked_limits: Collection[str] = (),
    force: bool = False,
    move: bool = False,
    sign: Sign | None = None,
    gate: Gate = OPEN,
    progress: BuildProgress = SILENT,
) -> EnginesManifest:
    """Build every graph of `bundle` into the new folder `output`, which then runs without the bundle.

    `asked_limits` are the fields of `limits` that the user gave. Engines that take any shape enforce these only.
    With `force`, engines that are there are replaced. With `move`, a graph and its weights are removed from the
    bundle as soon as the disk holds its engine, and in the end the bundle. `sign` signs the engines' manifest
    (`sinkprune.contract.files.signature.read_private_key`). Each engine must pass `gate` before its graph may go, and
    all together before they are put in their place.
    What can be known to be wrong is found before anything is written; whatever goes wrong later, `output` is left
    as it was, and engines that are whole are taken up by the next build of the same (`sinkprune.engines.unfinished`).
    Raises `EnginesError`, and `BundleError` for a bundle whose graphs the shapes cannot be told of.
    """
    check_outside(output, bundle.path, ENGINES)
    builder.check_bundle(bundle)
    profiles = optimisation_profiles(bundle.manifest, limits)
    asked = {ASKED_LIMITS: " ".join(asked_limits)} if asked_limits else {}
    plan = EnginesManifest(
        format_version=FORMAT_VERSION,
        sinkprune_version=version("sinkprune"),
        target=builder.target,
        library_version=builder.library_version,
        compute_capabilities=builder.compute_capabilities,
        bundle_sha256=bundle.sha256,
        checkpoint_sha256=bundle.manifest.checkpoint.config_sha256,
        plugins={},
        flags={**builder.flags, **asked, **gate.flags(bundle)},
        limits=limits,
        engines={},
        files={},
    )
    check_replaceable(output, ENGINES, force=force)
    with made_parents(output, ENGINES), unfinished(output, plan) as work:
        left = {graph: own for graph, own in profiles.items() if graph not in work.manifest.engines}
        models = {graph: _model(bundle, graph, work) for graph in left}
        work.start_anew()
        _check_room(bundle, left, builder, work.place, move=move, progress=progress)
        gate.prepare(bundle, builder.target, work.place / _RECORDING, progress)
        try:
            _build(bundle, models, left, work, builder, gate, move=move, progress=progress)
        except (SinkpruneError, KeyboardInterrupt) as error:
            done = len(work.manifest.engines)
            kept = (
                f"{done} of {len(profiles)} engines are whole and wait in '{work.place}': the same command goes on "
                "from there."
            )
            if done and isinstance(error, SinkpruneError):
                raise EnginesError(f"{error} {kept}") from error
            if done:
                progress.tell(kept)
            raise
        with replacing(output, ENGINES, 0, _WAY_OUT, force=force) as root:
            work.give(root)
            _bring_along(bundle, root / BUNDLE_FOLDER)
            files = {**work.manifest.files, **file_specs(root, work.manifest.files)}
            manifest = replace(work.manifest, files=files)
            ENGINES.write(root, manifest, sign)
            gate.whole(root)
        if move and (strangers := remove_listed(bundle.path, BUNDLE)):
            progress.tell(f"'{bundle.path}' holds what is not of the bundle, and stays: {first_names(strangers)}.")
    return manifest


def _model(bundle: Bundle, graph: str, work: Unfinished) -> Model:
    """The ONNX file of a graph that is to be built; raises `EnginesError` for one that is not there any more."""
    model = Model.of_bundle(bundle, graph)
    if model.name in bundle.files:
        return model
    raise EnginesError(
        f"'{bundle.path}' holds graph '{graph}' no more: a build with --move took it, and its engine in "
        f"'{work.place}' {'is another' if work.differs else 'is not whole'}"
        f"{', by ' + ', '.join(work.differs) if work.differs else ''}. Give the same options to go on with that "
        "build, or export the bundle again."
    )


def _check_room(
    bundle: Bundle,
    profiles: Mapping[str, OptimisationProfiles],
    builder: Builder,
    place: Path,
    *,
    move: bool,
    progress: BuildProgress,
) -> None:
    """Compare what building the graphs of `profiles` needs of memory and disk with what is free, and tell it."""
    memories = builder.memories()
    check_memory(bundle, profiles, memories)
    most = disk_bytes(bundle.manifest, profiles, builder.disk_copies, move=move)
    check_room(place, most, ENGINES, _WAY_OUT)
    if most >= TOLD_BYTES and profiles:
        largest = max(profiles, key=bundle.manifest.weight_bytes)
        told = need_and_free(bundle, largest, profiles[largest], memories) if memories else "building needs"
        progress.tell(f"{told}, and {gigabytes(most)} of disk")


def _build(
    bundle: Bundle,
    models: Mapping[str, Model],
    profiles: Mapping[str, OptimisationProfiles],
    work: Unfinished,
    builder: Builder,
    gate: Gate,
    *,
    move: bool,
    progress: BuildProgress,
) -> None:
    """Build the engines of `models` into `work`, one after the other: each may need most of the memory."""
    done = len(work.manifest.engines)
    users = Counter(name for model in models.values() for name in model.names)
    for number, (graph, model) in enumerate(models.items(), start=done):
        progress.graph(graph, number, done + len(models))
        engine = _engine(bundle, model, profiles[graph], work.root, builder, progress)
        gate.engine(graph, BuiltEngines(work.held(graph, engine, builder.plugins), bundle))
        work.add(graph, engine, builder.plugins)
        users.subtract(model.names)
        # The graph's own file first: without it everybody knows that the graph is gone.
        for name in model.names if move else ():
            if not users[name]:
                bundle.files[name].remove()


def _bring_along(bundle: Bundle, folder: Path) -> None:
    """Write into `folder` what the engines need of the bundle to run without it."""
    folder.mkdir()
    (folder / MANIFEST).write_bytes(read_bytes(bundle.path / MANIFEST, MANIFEST_BYTES, follow_links=False))
    if sha256(folder / MANIFEST) != bundle.sha256:
        raise EnginesError(f"'{bundle.path / MANIFEST}' was altered while engines were built. Build them again.")
    for name in BESIDE_GRAPHS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        bundle.files[name].copy(folder / name)


def _engine(
    bundle: Bundle,
    model: Model,
    profiles: OptimisationProfiles,
    root: Path,
    builder: Builder,
    progress: BuildProgress,
) -> EngineSpec:
    """Write the engine of `model` below `root`."""
    file = f"engines/{builder.file_name(model.graph)}"
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    try:
        built = builder.build(Job(model, profiles), root / file, progress)
    except OutOfMemoryError as error:
        told = need_and_free(bundle, model.graph, profiles, builder.memories())
        raise EnginesError(f"{error} By estimate, {told}. End other programs, or use a machine with more.") from error
    except (SinkpruneError, OSError) as error:
        # Libraries say of a full disk that they could not write.
        if shutil.disk_usage(root).free < _FULL_BYTES:
            raise EnginesError(
                f"the disk is full: the engine of graph '{model.graph}' could not be written in '{root}' ({error}) "
                "Free space, then give the same command again."
            ) from error
        raise
    seconds = round(time.perf_counter() - start, 3)
    return EngineSpec(file, built.optimisation_profiles, built.nodes, built.device_memory, seconds)
