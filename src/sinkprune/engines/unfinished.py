"""Engines of a build that has not come to its end, in a folder beside the one that it is to write.

`.NAME.building/` stands beside `NAME` and holds `sinkprune.lock`, which is locked while a build lives, and
`engines/`: a folder of engines like any other, of those graphs that are done. A build that is killed, or ends early
in another way, leaves it, and the same command goes on from there.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path

from sinkprune.contract.engines_manifest import ENGINES, Engines, EnginesManifest, EngineSpec
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.folders import is_own_folder
from sinkprune.contract.files.listed_files import listed_files, unlisted
from sinkprune.contract.files.manifest_file import FileSpec, file_specs
from sinkprune.contract.files.system_calls import locked, sync_folder, sync_tree
from sinkprune.contract.files.trust import ANY
from sinkprune.contract.files.untrusted import UnreadableError

_ENGINES = "engines"
_RECORD = "record"
# What a file system answers that knows no second name for a file.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV)
_GROWING = {"engines", "files", "plugins"}
"""What of a manifest grows with each engine; the rest says what is built, and how."""


def is_begun(output: Path) -> bool:
    """Whether a build of the folder `output` ended early and left engines that are whole."""
    return os.path.lexists(_place(output) / _ENGINES / ENGINES.name)


class Unfinished:
    """The engines that are done of a build; see `unfinished`."""

    def __init__(self, place: Path, plan: EnginesManifest) -> None:
        """Takes up what lies in `place` as far as it is whole and of the build `plan`, a manifest without engines."""
        self.place, self.root = place, place / _ENGINES
        self.manifest = plan
        """The plan, with the engines that are done."""
        self.differs: list[str] = []
        """In which fields what lay there was of another build, and so was not taken up."""
        found = self._found()
        if found is not None:
            told = [field.name for field in fields(plan) if field.name not in _GROWING]
            self.differs = [name for name in told if getattr(found, name) != getattr(plan, name)]
        if found is not None and not self.differs:
            self.manifest = found

    def _found(self) -> EnginesManifest | None:
        """The manifest of what lies there; None if there is none, or a file that it lists is not as it says."""
        try:
            found, _ = ENGINES.read(self.root, EnginesManifest, ANY)
            for name in list(unlisted(self.root, listed_files(self.root, ENGINES))):
                _remove(self.root / name)
            ENGINES.check_sums(self.root, ENGINES.hold(self.root, found.files), found.files)
        except (EnginesError, UnreadableError, OSError):
            return None
        return found

    def start_anew(self) -> None:
        """Remove what lies there and was not taken up."""
        if not self.manifest.engines:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir()

    def add(self, graph: str, engine: EngineSpec, plugins: dict[str, str]) -> None:
        """The engine of `graph`, written below `root`, is whole: from now on the disk holds it, and what says so.

        `plugins` are those that it calls; all files below `root` that are not listed yet are its own.
        """
        sync_tree(self.root)
        listed = self.manifest.files
        manifest = replace(
            self.manifest,
            engines={**self.manifest.engines, graph: engine},
            plugins={**self.manifest.plugins, **plugins},
            files={**listed, **file_specs(self.root, {*listed, ENGINES.name})},
        )
        beside = self.place / _RECORD
        beside.mkdir(exist_ok=True)
        ENGINES.write(beside, manifest)
        sync_tree(beside)
        (beside / ENGINES.name).replace(self.root / ENGINES.name)
        sync_folder(self.root)
        self.manifest = manifest

    def held(self, graph: str, engine: EngineSpec, plugins: dict[str, str]) -> Engines:
        """The engines that are done, and that of `graph`, which is written and not added yet; without its sums."""
        there = (path for path in self.root.rglob("*") if path.is_file() and path.name != ENGINES.name)
        files = {str(path.relative_to(self.root)): FileSpec(path.stat().st_size, "") for path in there}
        manifest = replace(
            self.manifest,
            engines={**self.manifest.engines, graph: engine},
            plugins={**self.manifest.plugins, **plugins},
            files=files,
        )
        return Engines(self.root, manifest, ENGINES.sha256(manifest), ENGINES.hold(self.root, files), ANY)

    def give(self, folder: Path) -> None:
        """Have all files of the engines in `folder` too: under a second name, or copied where there can be none."""
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
def unfinished(output: Path, plan: EnginesManifest) -> Iterator[Unfinished]:
    """The engines that are done of the build `plan` of the folder `output`; only one process at a time.

    When the block ends early, engines that are whole stay for the next time; when it is done, or nothing is whole,
    nothing stays. Raises `EnginesError` while another process builds this folder, or where a stranger's stands.
    """
    place = _place(output)
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    if not is_own_folder(place):
        raise EnginesError(f"'{place}' is not a folder of your own, and the build needs that place. Move it away.")
    with locked(place, create=True) as held:
        if not held:
            raise EnginesError(
                f"another sinkprune-build is writing '{output}'. Wait for it, or choose another place."
            )
        work = Unfinished(place, plan)
        keep = True
        try:
            yield work
            keep = False
        finally:
            if not (keep and is_begun(output)):
                shutil.rmtree(place, ignore_errors=True)


def _place(output: Path) -> Path:
    return output.absolute().with_name(f".{output.name}.building")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
