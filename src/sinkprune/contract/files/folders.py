"""Writes a folder next to its place, syncs it, and exchanges it with the folder that is there.

A process may be killed at any moment: the next command finds the old folder or the new one, whole. The staging folder
`.NAME.????????.partial/` next to `NAME` holds

- `sinkprune.lock`, locked while its process lives,
- `new/`, the folder that is being written: all of it is ours,
- `old/`, the folder that is replaced: the files that its manifest lists are ours.

Both `new/` and `old/` are there if a process was killed after it moved `NAME` away and before it moved `new/` there.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sinkprune.contract.files.listed_files import listed_files, remove_listed, unlisted_paths
from sinkprune.contract.files.manifest_file import ManifestFile
from sinkprune.contract.files.system_calls import (
    LOCK,
    UNSUPPORTED,
    Rename,
    RenameMode,
    locked,
    move,
    naming_full,
    sync_folder,
    sync_tree,
    system_rename,
)
from sinkprune.contract.files.untrusted import UnreadableError

_PARTIAL = ".partial"
# In bytes. File systems allow 255, and the staging folder's name is longer than the folder's.
_LONGEST_NAME = 255 - len(f"..12345678{_PARTIAL}")
# As many files as the removal of a folder opens at once: one for each level, and one to list the last.
_RESERVE = 8
# How often another process may change the place between the check and the rename.
_ATTEMPTS = 100


def recover(output: Path, kind: ManifestFile) -> None:
    """Put the folder `output` back if a process was killed after it moved the folder away.

    Raises `kind.error` if the folder cannot be moved back.
    """
    # A quick return for readers of folders that exist.
    if os.path.lexists(output):
        return
    with _abandoned(output, kind) as stagings:
        for staging in stagings:
            staging.restore()


def check_replaceable(output: Path, kind: ManifestFile, *, force: bool) -> None:
    """Reject an `output` that cannot become a new folder. Raises `kind.error`.

    Anything at `output` must be a folder of this kind with no files but those that its manifest lists, and `force`
    must be given.
    """
    _check_name(output, kind)
    recover(output, kind)
    try:
        mode = output.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise kind.error(f"'{output}' cannot be written: {error.strerror}. Choose another place.") from error
    if stat.S_ISLNK(mode):
        raise kind.error(
            f"'{output}' is a link to '{output.readlink()}'. Give the folder itself, or choose another place; "
            "it is left as it is."
        )
    try:
        listed = listed_files(output, kind)
    except UnreadableError as error:
        raise kind.error(
            f"'{output}' exists and is not {kind.a_folder}: its {kind.name} {error}. Choose another place; "
            "it is left as it is."
        ) from error
    if not force:
        raise kind.error(
            f"'{output}' is {kind.a_folder} already. Add --force to replace it, or choose another place."
        )
    if strangers := sorted(unlisted_paths(output, listed)):
        raise kind.error(
            f"'{output}' holds what its {kind.name} does not list: {first_names(strangers)}. Move it away, or choose "
            "another place; it is left as it is."
        )


def check_outside(output: Path, source: Path, kind: ManifestFile) -> None:
    """Reject an `output` within the folder `source`, which is an input. Raises `kind.error`."""
    if source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise kind.error(
            f"'{output}' lies within '{source}', which is read and stays as it is. Choose a place outside of it."
        )


def check_room(place: Path, needed: int, kind: ManifestFile, way_out: str) -> None:
    """Reject writing `needed` bytes beside `place`, or there, if fewer are free. Raises `kind.error`.

    `way_out` completes the message with a way to need less.
    """
    folder = place.absolute().parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise kind.error(
            f"no room for the {kind.folder}: {needed / 1e9:.1f} GB are needed, '{folder}' has "
            f"{free / 1e9:.1f} GB free. Free space, choose another place, or {way_out}."
        )


@contextmanager
def replacing(
    output: Path, kind: ManifestFile, needed: int, way_out: str, *, force: bool, rename: Rename = system_rename
) -> Iterator[Path]:
    """Yield a temporary folder with `needed` bytes free, which becomes `output` at the end of the block.

    The block writes a manifest of this `kind` that lists all other files. If anything fails, `output` stays as it was
    and the temporary folder is removed. Staging folders of killed processes are removed too. `way_out` completes the
    message about a full disk with a way to need less. `rename` exchanges folders. Raises `kind.error`, also for
    what `check_replaceable` rejects.
    """
    check_replaceable(output, kind, force=force)
    remove_abandoned(output, kind)
    with made_parents(output, kind), new_staging(output, kind, rename) as staging, naming_full(output):
        check_room(output, needed, kind, way_out)
        yield staging.new
        sync_tree(staging.new)
        staging.install(force=force)


@contextmanager
def made_parents(output: Path, kind: ManifestFile) -> Iterator[None]:
    """Make the folders above `output` for the block, and remove those made if the block fails."""
    made = [folder for folder in output.absolute().parents if not folder.exists()]
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            for folder in made:
                sync_folder(folder.parent)
        except OSError as error:
            raise unwritable(output, kind, error) from error
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def first_names(names: list[str]) -> str:
    """Return up to three of `names` in quotes, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def unwritable(output: Path, kind: ManifestFile, error: OSError) -> Exception:
    """Return the `kind.error` for a folder `output` that the system refused with `error`."""
    found = f"{error.strerror} in '{output.absolute().parent}'"
    return kind.error(f"'{output}' cannot be written: {found}. Choose a place you may write to.")


def is_own_folder(path: Path) -> bool:
    """Return whether `path` is a folder of this user, and no link to one."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


@dataclass(frozen=True)
class Staging:
    """A staging folder whose lock this process holds."""

    place: Path
    output: Path
    kind: ManifestFile
    rename: Rename = system_rename

    @property
    def new(self) -> Path:
        return self.place / "new"

    @property
    def old(self) -> Path:
        return self.place / "old"

    def install(self, *, force: bool) -> None:
        """Move the finished folder `new` to `output`. Whatever was there ends up in `old`."""
        for left in reversed(range(_ATTEMPTS)):
            # Hours may have passed since the first check.
            check_replaceable(self.output, self.kind, force=force)
            try:
                if os.path.lexists(self.output):
                    # An earlier attempt may have filled `old`.
                    self._remove_old()
                    self._exchange()
                else:
                    move(self.new, self.output, self.rename)
                break
            except OSError as error:
                # Another process may create or remove `output` after the check.
                overtaken = isinstance(error, (FileExistsError, FileNotFoundError)) and self.new.is_dir()
                if not (overtaken and left):
                    raise unwritable(self.output, self.kind, error) from error
        # The disk must hold the new name before old files are removed.
        sync_folder(self.place)
        sync_folder(self.output.parent)

    def _exchange(self) -> None:
        # From here on only listed files are removed, so files that appear in `output` meanwhile survive.
        self.new.rename(self.old)
        try:
            self.rename(self.old, self.output, RenameMode.EXCHANGE)
        except OSError as error:
            # Nothing was exchanged. After KeyboardInterrupt this is not certain, so it must not come here.
            self.old.rename(self.new)
            if error.errno not in UNSUPPORTED:
                raise
            # If the process is killed between these two renames, `recover` puts the old folder back.
            self.output.rename(self.old)
            move(self.new, self.output, self.rename)

    def restore(self) -> None:
        """Move `old` back to `output` if nothing replaced it. Raises `kind.error` if that is impossible."""
        if not (_is_folder(self.new) and _is_folder(self.old)):
            return
        try:
            listed_files(self.old, self.kind)
        except UnreadableError:
            return
        try:
            move(self.old, self.output)
        except OSError as error:
            raise self.kind.error(
                f"the {self.kind.folder} that stood at '{self.output}' lies in '{self.old}' and cannot be put back: "
                f"{error.strerror}. Move it where you want it, then remove '{self.place}'."
            ) from error
        sync_folder(self.output.parent)

    def remove(self) -> None:
        """Remove the staging folder. Raises `kind.error` for files that are not ours, and keeps them."""
        self.restore()
        shutil.rmtree(self.new, ignore_errors=True)
        self._remove_old()
        if os.listdir(self.place) == [LOCK]:  # noqa: PTH208
            (self.place / LOCK).unlink()
            # Another process may remove the empty folder first.
            with suppress(FileNotFoundError):
                self.place.rmdir()

    def _remove_old(self) -> None:
        if not _is_folder(self.old):
            return
        try:
            left = remove_listed(self.old, self.kind)
        except OSError as error:
            raise self.kind.error(
                f"the {self.kind.folder} that was replaced at '{self.output}' lies in '{self.old}' and cannot be "
                f"removed: {error.strerror}. The new {self.kind.folder} is in its place. Remove '{self.place}' by "
                "hand."
            ) from error
        if left:
            raise self.kind.error(
                f"{first_names(left)} came into '{self.output}' while it was replaced, and lies in '{self.old}' now. "
                f"The new {self.kind.folder} is in its place. Move what is yours away, then remove '{self.place}'."
            )


@contextmanager
def new_staging(output: Path, kind: ManifestFile, rename: Rename = system_rename) -> Iterator[Staging]:
    """Make a staging folder for `output` with an empty `new`, and remove it after the block. Raises `kind.error`."""
    with ExitStack() as stack:
        reserve, held = stack.enter_context(ExitStack()), False
        try:
            for _ in range(_RESERVE):
                reserve.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while not held:
                name = tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_PARTIAL, dir=output.absolute().parent)
                place = Path(name)
                try:
                    held = stack.enter_context(locked(place, create=True))
                except FileNotFoundError:
                    # Before it is locked, another process may take it for abandoned and remove it.
                    continue
                except OSError:
                    place.rmdir()
                    raise
            staging = Staging(place, output, kind, rename)
            stack.callback(staging.remove)
            stack.callback(reserve.close)
            staging.new.mkdir()
        except OSError as error:
            raise unwritable(output, kind, error) from error
        yield staging


def remove_abandoned(output: Path, kind: ManifestFile) -> None:
    """Remove the staging folders of killed processes. Raises `kind.error` for files that are not ours."""
    for place in _places(output):
        # An empty folder: its process was killed before it made the lock.
        with suppress(OSError):
            place.rmdir()
    with _abandoned(output, kind) as stagings:
        for staging in stagings:
            staging.remove()


@contextmanager
def _abandoned(output: Path, kind: ManifestFile) -> Iterator[list[Staging]]:
    """Lock the staging folders for `output` whose processes have ended, and yield them."""
    with ExitStack() as stack:
        stagings = []
        for place in _places(output):
            with suppress(OSError):
                if stack.enter_context(locked(place, create=False)):
                    stagings.append(Staging(place, output, kind))
        yield stagings


def _places(output: Path) -> list[Path]:
    """Return the folders next to `output` that have the name of a staging folder."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.[a-z0-9_]{{8}}{re.escape(_PARTIAL)}")
    try:
        named = sorted(path for path in output.parent.iterdir() if pattern.fullmatch(path.name))
        return [path for path in named if is_own_folder(path)]
    except (OSError, ValueError):
        return []


def _check_name(output: Path, kind: ManifestFile) -> None:
    """Reject a path that no folder can have, or that no message can show."""
    text = str(output)
    if "\0" in text:
        raise kind.error(f"the name {text!a} holds a NUL. Choose another.")
    if text != text.encode(errors="replace").decode():
        raise kind.error(f"the name {text!a} is not UTF-8. Choose another.")
    if output.name in ("", ".."):
        raise kind.error(f"'{output}' names no new folder. Give it a name, as in '{output / kind.folder}'.")
    length = len(output.name.encode())
    if length > _LONGEST_NAME:
        raise kind.error(
            f"'{output}' has a name of {length} bytes, expected at most {_LONGEST_NAME}. Choose another."
        )
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise kind.error(f"'{output}' cannot be written: '{above}' is no folder. Choose another place.")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
