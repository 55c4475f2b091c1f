"""Builds the engines of a bundle.

`.NAME.building/` is next to `NAME`, and locked while a build runs. It holds `engines/`, a normal folder of engines. A
build that is killed or fails leaves it there, and the same command resumes from it.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import (
    ANY_SHAPE,
    ASKED_LIMITS,
    ENGINES,
    FORMAT_VERSION,
    Engines,
    EnginesManifest,
    EngineSpec,
    Limits,
)
from sinkprune.contract.errors import EnginesError, OutOfMemoryError, SinkpruneError
from sinkprune.contract.files import folders
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.manifest_file import FileSpec, file_specs, sha256
from sinkprune.contract.files.output_files import check_in_no_bundle
from sinkprune.contract.files.trust import ANY, Sign
from sinkprune.contract.files.untrusted import MANIFEST_BYTES, UnreadableError, read_bytes
from sinkprune.contract.manifest import BESIDE_GRAPHS, BUNDLE, BUNDLE_FOLDER, MANIFEST
from sinkprune.contract.memory import LEAST_REPORTED_BYTES, gigabytes
from sinkprune.engines.gate.comparing import Gate
from sinkprune.engines.profiles import SmallGraphs, optimisation_profiles, small_profiles
from sinkprune.engines.progress import SILENT, BuildProgress
from sinkprune.engines.targets import Builder, BuildJob, check_memory, disk_bytes, need_and_free
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.frames import FrameForm

_ENGINES = "engines"
_BUILDING = "building"
# The errors of file systems that cannot give a file a second name.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
_GROWING = {"engines", "files", "plugins"}
"""The fields of a manifest that grow with each engine; all others are fixed for one build."""


def is_begun(output: Path) -> bool:
    """Return whether an earlier build of the folder `output` left complete engines."""
    return os.path.lexists(folders.beside(output, _BUILDING) / _ENGINES / ENGINES.name)


class UnfinishedBuild:
    """The complete engines of a build; see `unfinished_build`."""

    def __init__(self, place: Path, plan: EnginesManifest) -> None:
        """Reuse the engines in `place` if they are complete and of the build `plan`, a manifest without engines."""
        self.place, self.root = place, place / _ENGINES
        self.manifest = plan
        """The plan with the complete engines."""
        self.differs: list[str] = []
        """The fields in which the engines in `place` are of another build, and so are not reused."""
        try:
            found, _ = ENGINES.read(self.root, EnginesManifest, ANY)
            for name in folders.unlisted_files(self.root, ENGINES):
                (self.root / name).unlink()
            ENGINES.check_sums(self.root, ENGINES.hold(self.root, found.files), found.files)
        except (EnginesError, UnreadableError, OSError):
            # There is no manifest, or a listed file is missing or has changed.
            return
        fixed = [field.name for field in fields(plan) if field.name not in _GROWING]
        self.differs = [name for name in fixed if getattr(found, name) != getattr(plan, name)]
        if not self.differs:
            self.manifest = found

    def build(self, bundle: Bundle, job: BuildJob, builder: Builder, progress: BuildProgress) -> Engines:
        """Return the complete engines with the new engine of `job`, which is not added yet, without sums.

        Raises what `Builder.build` raises, and `EnginesError` for a full disk.
        """
        graph, start = job.model.graph, time.perf_counter()
        file = f"engines/{builder.file_name(graph)}"
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        try:
            built = builder.build(job, self.root / file, progress)
        except (SinkpruneError, OSError) as error:
            if isinstance(error, OutOfMemoryError) and graph in bundle.manifest.graphs:
                need = need_and_free(bundle, graph, job.optimisation_profiles, builder.memories())
                advice = "End other programs, or use a machine with more."
                raise EnginesError(f"{error} By estimate, {need}. {advice}") from error
            # On a full disk, libraries only report that they could not write.
            if shutil.disk_usage(self.root).free < _FULL_BYTES:
                raise EnginesError(
                    f"the disk is full: the engine of graph '{graph}' could not be written in '{self.root}' "
                    f"({error}) Free space, then give the same command again."
                ) from error
            raise
        seconds = round(time.perf_counter() - start, 3)
        profiles = {} if builder.target in ANY_SHAPE else job.optimisation_profiles
        engine = EngineSpec(file, profiles, built.nodes, built.device_memory, seconds)
        paths = (path for path in self.root.rglob("*") if path.is_file() and path.name != ENGINES.name)
        files = {str(path.relative_to(self.root)): FileSpec(path.stat().st_size, "") for path in paths}
        engines, plugins = {**self.manifest.engines, graph: engine}, {**self.manifest.plugins, **builder.plugins}
        manifest = replace(self.manifest, engines=engines, plugins=plugins, files=files)
        return Engines(self.root, manifest, ENGINES.sha256(manifest), ENGINES.hold(self.root, files), ANY)

    def add(self, engines: Engines) -> None:
        """Sync the new engine of `engines` to disk, and then the manifest that lists it."""
        folders.sync_tree(self.root)
        listed = self.manifest.files
        files = {**listed, **file_specs(self.root, {*listed, ENGINES.name})}
        manifest = replace(engines.manifest, files=files)
        ENGINES.write(self.root, manifest)
        folders.sync_folder(self.root)
        self.manifest = manifest

    def copy_to(self, folder: Path) -> None:
        """Give all files of the engines a second name in `folder`, or copy them if the file system has no links."""
        for name in self.manifest.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(self.root / name)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                shutil.copyfile(self.root / name, target)


@contextmanager
def unfinished_build(output: Path, plan: EnginesManifest) -> Iterator[UnfinishedBuild]:
    """Open the folder for the build `plan` of the folder `output`, for one process at a time.

    If the block raises, complete engines stay for the next build; otherwise the folder is removed. Raises
    `EnginesError` if another process builds this folder, or if the place belongs to another user.
    """
    with folders.staging(output, _BUILDING, ENGINES) as place:
        work = UnfinishedBuild(place, plan)
        keep = True
        try:
            yield work
            keep = False
        finally:
            if not (keep and is_begun(output)):
                # Its folder is removed with the lock.
                for path in place.iterdir():
                    shutil.rmtree(path, ignore_errors=True)


# Folders in that of an unfinished build.
_RECORDING, _SMALL = "recording", "small"
# A disk with less free space is full: other programs write too, and file systems reserve some.
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
    gate: Gate | None = None,
    progress: BuildProgress = SILENT,
) -> EnginesManifest:
    """Build every graph of `bundle` into the new folder `output`, which then runs without the bundle.

    `asked_limits` are the fields of `limits` that the user gave; engines that take any shape enforce only these.
    `force` replaces existing engines. `move` removes each graph and its weights from the bundle once the disk holds
    its engine, and the bundle at the end. `sign` signs the engines' manifest
    (`sinkprune.contract.files.signature.read_private_key`). Each engine must pass `gate` before its graph is removed,
    and all engines together before the folder is in its place.

    Errors that can be foreseen are raised before anything is written. After a later error `output` is unchanged, and
    the next build with the same arguments reuses complete engines (`sinkprune.engines.build`).
    Raises `EnginesError`, and `BundleError` for a graph with an unknown dynamic dimension.
    """
    folders.check_outside(output, bundle.path, ENGINES)
    check_in_no_bundle(output)
    builder.check_bundle(bundle)
    profiles = optimisation_profiles(bundle.manifest, limits)
    asked = {ASKED_LIMITS: " ".join(asked_limits)} if asked_limits else {}
    small = SmallGraphs.of(bundle.manifest, limits) if builder.small_graphs else SmallGraphs({}, {})
    total = len(profiles) + len(small.graphs)
    plan = EnginesManifest(
        format_version=FORMAT_VERSION,
        sinkprune_version=version("sinkprune"),
        target=builder.target,
        library_version=builder.library_version,
        compute_capabilities=builder.compute_capabilities,
        bundle_sha256=bundle.sha256,
        checkpoint_sha256=bundle.manifest.checkpoint.config_sha256,
        plugins={},
        flags={**builder.flags, **asked, **(gate.flags(bundle) if gate else {})},
        limits=limits,
        engines={},
        files={},
    )
    folders.check_replaceable(output, ENGINES, force=force)
    with folders.made_parents(output, ENGINES), unfinished_build(output, plan) as work:
        jobs = {
            graph: BuildJob(_model(bundle, graph, work), own)
            for graph, own in profiles.items()
            if graph not in work.manifest.engines
        }
        if not work.manifest.engines:
            shutil.rmtree(work.root, ignore_errors=True)
            work.root.mkdir()
        _check_room(bundle, jobs, builder, work.place, move, progress)
        try:
            if gate:
                gate.record_graphs(bundle, builder.target, work.place / _RECORDING, progress)
            try:
                _build(bundle, jobs, small, work, builder, gate, move=move, progress=progress)
            except SinkpruneError as error:
                if not work.manifest.engines:
                    raise
                raise EnginesError(f"{error} {_kept(work, total)}") from error
            with folders.replacing(output, ENGINES, 0, _WAY_OUT, force=force) as root:
                work.copy_to(root)
                _copy_bundle_files(bundle, root / BUNDLE_FOLDER)
                files = {**work.manifest.files, **file_specs(root, work.manifest.files)}
                manifest = replace(work.manifest, files=files)
                ENGINES.write(root, manifest, sign)
                if gate:
                    gate.check_answers(root, progress)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(_kept(work, total)) from interrupt
        if move and (strangers := folders.unlisted_files(bundle.path, BUNDLE)):
            progress.report(
                f"'{bundle.path}' holds what is not of the bundle, and stays: {folders.first_names(strangers)}."
            )
        elif move:
            shutil.rmtree(bundle.path.resolve())
    return manifest


def _kept(work: UnfinishedBuild, total: int) -> str:
    done = len(work.manifest.engines)
    if not done:
        return "no engine was complete, so nothing was kept."
    return f"{done} of {total} engines are whole and wait in '{work.place}': the same command goes on from there."


def _model(bundle: Bundle, graph: str, work: UnfinishedBuild) -> Model:
    """Return the ONNX file of a graph; raises `EnginesError` if it is missing."""
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
    bundle: Bundle, jobs: Mapping[str, BuildJob], builder: Builder, place: Path, move: bool, progress: BuildProgress
) -> None:
    memories = builder.memories()
    check_memory(bundle, {graph: job.optimisation_profiles for graph, job in jobs.items()}, memories)
    most = disk_bytes(bundle.manifest, jobs, builder.target, move=move)
    folders.check_room(place, most, ENGINES, _WAY_OUT)
    if most >= LEAST_REPORTED_BYTES and jobs:
        largest = max(jobs, key=bundle.manifest.weight_bytes)
        memory = need_and_free(bundle, largest, jobs[largest].optimisation_profiles, memories)
        progress.report(f"{memory if memories else 'building needs'}, and {gigabytes(most)} of disk")


def _build(
    bundle: Bundle,
    jobs: Mapping[str, BuildJob],
    small: SmallGraphs,
    work: UnfinishedBuild,
    builder: Builder,
    gate: Gate | None,
    *,
    move: bool,
    progress: BuildProgress,
) -> None:
    """Build the engines of `jobs`, and of small graphs, one after the other: each may need most of the memory.

    No gate compares small graphs, because they are exact.
    """
    folder, total = work.place / _SMALL, len(work.manifest.engines) + len(jobs)
    folder.mkdir(exist_ok=True)
    others = [job for job in small_jobs(small, folder) if job.model.graph not in work.manifest.engines]
    users = Counter(name for job in jobs.values() for name in job.model.names)
    for job in (*jobs.values(), *others):
        graph, done = job.model.graph, len(work.manifest.engines)
        progress.graph(graph, done, total + len(others))
        engines = work.build(bundle, job, builder, progress)
        if gate and graph in jobs:
            gate.check_engine(graph, BuiltEngines(engines, bundle))
        work.add(engines)
        users.subtract(job.model.names)
        # The graph's own file first: a missing file means that the graph is gone.
        for name in job.model.names if move and graph in jobs else ():
            if not users[name]:
                bundle.files[name].remove()


def small_jobs(small: FrameForm | SmallGraphs, folder: Path) -> Iterator[BuildJob]:
    """Yield a job for each of these graphs, whose files are written to `folder`."""
    for name, profiles in small_profiles(small).items():
        path, spec = folder / f"{name}.onnx", small.graphs[name].spec(f"{name}.onnx")
        path.write_bytes(small.graphs[name].model())
        held = {path.name: HeldFile(path, EnginesError)}
        yield BuildJob(Model(name, spec, path.name, held, 0), profiles, exact_fp32=True)


def _copy_bundle_files(bundle: Bundle, folder: Path) -> None:
    folder.mkdir()
    (folder / MANIFEST).write_bytes(read_bytes(bundle.path / MANIFEST, MANIFEST_BYTES, follow_links=False))
    if sha256(folder / MANIFEST) != bundle.sha256:
        raise EnginesError(f"'{bundle.path / MANIFEST}' was altered while engines were built. Build them again.")
    for name in BESIDE_GRAPHS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        bundle.files[name].copy(folder / name)
