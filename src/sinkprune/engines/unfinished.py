"""The complete engines of a build that has not ended, in a folder next to its output.

`.NAME.building/` is next to `NAME`, and locked while a build runs. It holds `engines/`, a normal folder of engines. A
build that is killed or fails leaves it there, and the same command resumes from it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from sinkprune.contract.engines_manifest import ENGINES, Engines, EnginesManifest, EngineSpec
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.folders import beside, staging, sync_folder, sync_tree, unlisted_files
from sinkprune.contract.files.manifest_file import FileSpec, file_specs
from sinkprune.contract.files.trust import ANY
from sinkprune.contract.files.untrusted import UnreadableError

_ENGINES = "engines"
_BUILDING = "building"
# The errors of file systems that cannot give a file a second name.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
_GROWING = {"engines", "files", "plugins"}
"""The fields of a manifest that grow with each engine; all others are fixed for one build."""


def is_begun(output: Path) -> bool:
    """Return whether an earlier build of the folder `output` left complete engines."""
    return os.path.lexists(beside(output, _BUILDING) / _ENGINES / ENGINES.name)


class UnfinishedBuild:
    """The complete engines of a build; see `unfinished_build`."""

    def __init__(self, place: Path, plan: EnginesManifest) -> None:
        """Reuse the engines in `place` if they are complete and of the build `plan`, a manifest without engines."""
        self.place, self.root = place, place / _ENGINES
        self.manifest = plan
        """The plan with the complete engines."""
        self.differs: list[str] = []
        """The fields in which the engines in `place` are of another build, and so are not reused."""
        found = self._found()
        if found is not None:
            fixed = [field.name for field in fields(plan) if field.name not in _GROWING]
            self.differs = [name for name in fixed if getattr(found, name) != getattr(plan, name)]
            if not self.differs:
                self.manifest = found

    def _found(self) -> EnginesManifest | None:
        """Return the manifest in `root`; None if there is none, or if a listed file is missing or has changed."""
        try:
            found, _ = ENGINES.read(self.root, EnginesManifest, ANY)
            for name in unlisted_files(self.root, ENGINES):
                (self.root / name).unlink()
            ENGINES.check_sums(self.root, ENGINES.hold(self.root, found.files), found.files)
        except (EnginesError, UnreadableError, OSError):
            return None
        return found

    def remove_unusable(self) -> None:
        """Remove engines that are not reused."""
        if not self.manifest.engines:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir()

    def add(self, graph: str, engine: EngineSpec, plugins: dict[str, str]) -> None:
        """Sync the new engine of `graph` below `root` to disk, and then the manifest that lists it.

        `plugins` are those that the engine calls. Files below `root` that are not listed yet are the engine's own.
        """
        sync_tree(self.root)
        listed = self.manifest.files
        files = {**listed, **file_specs(self.root, {*listed, ENGINES.name})}
        manifest = self._manifest_with(graph, engine, plugins, files)
        ENGINES.write(self.root, manifest)
        sync_folder(self.root)
        self.manifest = manifest

    def with_engine(self, graph: str, engine: EngineSpec, plugins: dict[str, str]) -> Engines:
        """Return the complete engines and the new engine of `graph`, which is not added yet, without sums."""
        paths = (path for path in self.root.rglob("*") if path.is_file() and path.name != ENGINES.name)
        files = {str(path.relative_to(self.root)): FileSpec(path.stat().st_size, "") for path in paths}
        manifest = self._manifest_with(graph, engine, plugins, files)
        return Engines(self.root, manifest, ENGINES.sha256(manifest), ENGINES.hold(self.root, files), ANY)

    def _manifest_with(
        self, graph: str, engine: EngineSpec, plugins: dict[str, str], files: dict[str, FileSpec]
    ) -> EnginesManifest:
        known = self.manifest
        return replace(
            known, engines={**known.engines, graph: engine}, plugins={**known.plugins, **plugins}, files=files
        )

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
    with staging(output, _BUILDING, ENGINES) as place:
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
