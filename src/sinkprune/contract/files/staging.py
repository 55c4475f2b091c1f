"""The folder beside its place that another is written in, and what becomes of it when its process is killed.

`.NAME.????????.partial/` stands beside `NAME` and holds

- `sinkprune.lock`, which is locked while its process lives: the system unlocks it, however the process ended;
- `new/`, which is being written: all of it is ours;
- `old/`, which was replaced or is about to change places with what is: of it, what its manifest lists is ours.

`new/` together with `old/` says that the process ended when `NAME` was moved away and `new/` not yet put there.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sinkprune.contract.files.durable import sync_folder
from sinkprune.contract.files.folder_lock import LOCK, hold, open_lock
from sinkprune.contract.files.listed_files import listed_files, remove_listed
from sinkprune.contract.files.manifest_file import ManifestFile
from sinkprune.contract.files.system_rename import move
from sinkprune.contract.files.untrusted import UnreadableError

_PARTIAL = ".partial"
ADDED_CHARACTERS = len("..") + 8 + len(_PARTIAL)
"""By how much the name of a staging folder is longer than the name it is for."""


@dataclass(frozen=True)
class Staging:
    """A staging folder whose lock this process holds."""

    place: Path
    output: Path
    """What is replaced by `new`."""
    lock: int

    @property
    def new(self) -> Path:
        """The folder that is being written."""
        return self.place / "new"

    @property
    def old(self) -> Path:
        """The folder that was replaced, or is about to change places with what is."""
        return self.place / "old"

    def release(self) -> None:
        """Give up the lock: whoever comes next may remove what is left."""
        os.close(self.lock)

    def restore(self, kind: ManifestFile) -> None:
        """Put back what was moved from `output` and not replaced; raises `kind.error` where that cannot be done."""
        if not (_is_folder(self.new) and _is_folder(self.old)):
            return
        try:
            listed_files(self.old, kind)
        except UnreadableError:
            return
        try:
            move(self.old, self.output)
        except OSError as error:
            raise kind.error(
                f"the {kind.folder} that stood at '{self.output}' lies in '{self.old}' and cannot be put back: "
                f"{error.strerror}. Move it where you want it, then remove '{self.place}'."
            ) from error
        sync_folder(self.output.parent)

    def remove(self, kind: ManifestFile) -> None:
        """Remove the staging folder; what is not ours stays, and is told as a `kind.error`."""
        self.restore(kind)
        shutil.rmtree(self.new, ignore_errors=True)
        self.remove_old(kind)
        if [path.name for path in self.place.iterdir()] == [LOCK]:
            (self.place / LOCK).unlink()
            # Whoever takes an empty one for dead may be faster.
            with suppress(FileNotFoundError):
                self.place.rmdir()

    def remove_old(self, kind: ManifestFile) -> None:
        """Remove what was replaced; what is not ours in it stays, and is told as a `kind.error`."""
        if not _is_folder(self.old):
            return
        try:
            left = remove_listed(self.old, kind)
        except OSError as error:
            raise kind.error(
                f"the {kind.folder} that was replaced at '{self.output}' lies in '{self.old}' and cannot be removed: "
                f"{error.strerror}. The new {kind.folder} is in its place. Remove '{self.place}' by hand."
            ) from error
        if left:
            raise kind.error(
                f"{named(left)} came into '{self.output}' while it was replaced, and lies in '{self.old}' now. "
                f"The new {kind.folder} is in its place. Move what is yours away, then remove '{self.place}'."
            )


def named(names: list[str]) -> str:
    """Up to three of `names`, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def new_staging(output: Path) -> Staging:
    """A staging folder for `output`, which holds an empty `new`; raises `OSError`."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_PARTIAL, dir=output.absolute().parent))
        # Until it is locked it can be taken for a dead one's, and be removed.
        with suppress(FileNotFoundError):
            lock = open_lock(place, os.O_CREAT | os.O_EXCL)
            try:
                held = hold(lock)
            except OSError:
                # Nobody can hold a lock on this file system, so nobody takes this for a dead one's.
                held = True
            if held:
                staging = Staging(place, output, lock)
                staging.new.mkdir()
                return staging
            os.close(lock)


def dead_stagings(output: Path) -> Iterator[Staging]:
    """The staging folders for `output` whose processes have ended; whoever is given one releases it."""
    for place in _places(output):
        try:
            lock = open_lock(place)
        except OSError:
            continue
        try:
            held = hold(lock)
        except OSError:
            held = False
        if held:
            yield Staging(place, output, lock)
        else:
            os.close(lock)


def remove_dead(output: Path, kind: ManifestFile) -> None:
    """Remove what processes left beside `output` that were killed; raises `kind.error` for what is not ours in it."""
    for place in _places(output):
        # An empty one: its process was killed before it had made the lock.
        with suppress(OSError):
            place.rmdir()
    for staging in dead_stagings(output):
        try:
            staging.remove(kind)
        finally:
            staging.release()


def _places(output: Path) -> list[Path]:
    """Everything beside `output` that bears the name of a staging folder for it."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.[a-z0-9_]{{8}}{re.escape(_PARTIAL)}")
    try:
        return sorted(path for path in output.parent.iterdir() if pattern.fullmatch(path.name) and is_ours(path))
    except (OSError, ValueError):
        return []


def is_ours(path: Path) -> bool:
    """Whether a folder stands there, and no link to one, that this user made."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_folder(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISDIR(path.lstat().st_mode)
