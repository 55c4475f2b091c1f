"""Writing a folder so that it is there whole or not at all: written beside its place, then put there in one step.

Killed at any moment, the next command finds the old folder or the new one, whole.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkprune.contract.files.durable import sync_folder, sync_tree
from sinkprune.contract.files.listed_files import listed_files, unlisted
from sinkprune.contract.files.manifest_file import ManifestFile
from sinkprune.contract.files.staging import ADDED_CHARACTERS, Staging, dead_stagings, named, new_staging, remove_dead
from sinkprune.contract.files.system_rename import How, Rename, UnsupportedError, move, system_rename
from sinkprune.contract.files.untrusted import UnreadableError

# What file systems take as a name, in bytes.
_LONGEST_NAME = 255
# How often another process may be faster before that is an error.
_ROUNDS = 100


def recover(output: Path, kind: ManifestFile) -> None:
    """Put the folder `output` back if a process was killed after it had moved it away; else nothing.

    Raises `kind.error` where it lies there whole and cannot be put back.
    """
    # A cheap question, for commands that find nothing where they were told to read.
    if os.path.lexists(output):
        return
    for staging in dead_stagings(output):
        try:
            staging.restore(kind)
        finally:
            staging.release()


def check_replaceable(output: Path, kind: ManifestFile, *, force: bool) -> None:
    """Refuse an `output` that cannot be a new folder: raises `kind.error`.

    Where something stands it must be of this kind, hold only what its manifest lists, and `force` must be given.
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
        tree = listed_files(output, kind)
    except UnreadableError as error:
        raise kind.error(
            f"'{output}' exists and is not {kind.a_folder}: its {kind.name} {error}. Choose another place; "
            "it is left as it is."
        ) from error
    if not force:
        raise kind.error(
            f"'{output}' is {kind.a_folder} already. Add --force to replace it, or choose another place."
        )
    if strangers := sorted(unlisted(output, tree)):
        raise kind.error(
            f"'{output}' holds what its {kind.name} does not list: {named(strangers)}. Move it away, or choose "
            "another place; it is left as it is."
        )


def check_outside(output: Path, source: Path, kind: ManifestFile) -> None:
    """Refuse an `output` that would lie within the folder `source`, which is read: raises `kind.error`."""
    if source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise kind.error(
            f"'{output}' lies within '{source}', which is read and stays as it is. Choose a place outside of it."
        )


def check_room(place: Path, needed: int, kind: ManifestFile, way_out: str) -> None:
    """Refuse to write `needed` bytes below `place`, a folder beside what is written, where fewer are free.

    `way_out` says how to need less. Raises `kind.error`.
    """
    free = shutil.disk_usage(place).free
    if free < needed:
        raise kind.error(
            f"no room for the {kind.folder}: {needed / 1e9:.1f} GB are needed, '{place.parent}' has "
            f"{free / 1e9:.1f} GB free. Free space, choose another place, or {way_out}."
        )


@contextmanager
def replacing(
    output: Path, kind: ManifestFile, needed: int, way_out: str, *, force: bool, rename: Rename = system_rename
) -> Iterator[Path]:
    """A temporary folder with `needed` bytes free, which becomes `output` when the block is done.

    The block writes a manifest of this kind that lists all other files. Whatever goes wrong, `output` is left as it
    was and the temporary folder is removed; so is what was left beside `output` by processes that were killed. The
    disk holds every file before it is there. `way_out` says how to need less; `rename` is how the system puts it in
    its place. Raises `kind.error`, also for what `check_replaceable` refuses.
    """
    check_replaceable(output, kind, force=force)
    remove_dead(output, kind)
    with made_parents(output, kind):
        try:
            staging = new_staging(output)
        except OSError as error:
            raise _unwritable(output, kind, error) from error
        try:
            check_room(staging.new, needed, kind, way_out)
            yield staging.new
            sync_tree(staging.new)
            _install(staging, kind, rename, force=force)
        finally:
            try:
                staging.remove(kind)
            finally:
                staging.release()


def _install(staging: Staging, kind: ManifestFile, rename: Rename, *, force: bool) -> None:
    """Put the finished folder in its place; what stands there comes to lie in the staging folder."""
    for rounds_left in reversed(range(_ROUNDS)):
        # Hours may have passed: what came to stand there meanwhile is not ours to replace.
        check_replaceable(staging.output, kind, force=force)
        try:
            if os.path.lexists(staging.output):
                # What an earlier round moved away was replaced by another process since.
                staging.remove_old(kind)
                _exchange(staging, rename)
            else:
                move(staging.new, staging.output, rename)
            break
        except OSError as error:
            # Another process may put its folder there, or take it away, between the question and the answer.
            overtaken = isinstance(error, (FileExistsError, FileNotFoundError)) and staging.new.is_dir()
            if not overtaken or not rounds_left:
                raise _unwritable(staging.output, kind, error) from error
    # First the new name, then the end of the old files.
    sync_folder(staging.place)
    sync_folder(staging.output.parent)


def _exchange(staging: Staging, rename: Rename) -> None:
    """Have the new folder and the one that stands there change places, in one step where the system can."""
    # From here on it is removed by its list: whatever lies under this name later, nothing of a user's goes with it.
    staging.new.rename(staging.old)
    try:
        rename(staging.old, staging.output, How.EXCHANGE)
    except (UnsupportedError, OSError) as error:
        # Nothing was done. An interrupt can come when all was done, and must not end up here.
        staging.old.rename(staging.new)
        if isinstance(error, OSError):
            raise
        # A process killed between these two leaves what `recover` mends.
        staging.output.rename(staging.old)
        move(staging.new, staging.output, rename)


def _check_name(output: Path, kind: ManifestFile) -> None:
    """Refuse a path that no folder can have, or that no message could show."""
    text = str(output)
    if "\0" in text or not _is_utf8(text):
        what = "holds a NUL" if "\0" in text else "is not UTF-8"
        raise kind.error(f"the name {text!a} {what}. Choose another.")
    if output.name in ("", ".."):
        raise kind.error(f"'{output}' names no new folder. Give it a name, as in '{output / kind.folder}'.")
    longest = _LONGEST_NAME - ADDED_CHARACTERS
    if len(output.name.encode()) > longest:
        raise kind.error(
            f"'{output}' has a name of {len(output.name.encode())} bytes, expected at most {longest}. Choose another."
        )
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise kind.error(f"'{output}' cannot be written: '{above}' is no folder. Choose another place.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def made_parents(output: Path, kind: ManifestFile) -> Iterator[None]:
    """The folders above `output`, made where there are none; if the block fails, those that were made go again."""
    made = [folder for folder in output.absolute().parents if not folder.exists()]
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            for folder in made:
                sync_folder(folder.parent)
        except OSError as error:
            raise _unwritable(output, kind, error) from error
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _unwritable(output: Path, kind: ManifestFile, error: OSError) -> Exception:
    return kind.error(
        f"'{output}' cannot be written: {error.strerror} in '{output.absolute().parent}'. Choose a place you may "
        "write to."
    )
