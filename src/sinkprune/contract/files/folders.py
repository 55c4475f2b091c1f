"""Writes a folder next to its place, syncs it, moves the old folder away, and renames the new one to its place.

The staging folder `.NAME.partial/` next to `NAME` holds `new/`, the folder that is being written, and `old/`, the
folder that is replaced. A killed process leaves the staging folder there. If both are in it and `NAME` is missing,
the next command that reads or writes `NAME` moves `old/` back. The next command that writes `NAME` removes the rest.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkprune.contract.files.manifest_file import ManifestFile
from sinkprune.contract.files.untrusted import UnreadableError, read_json
from sinkprune.contract.memory import compared_sizes

# File systems write concurrent requests together: 60 files take 10 ms, and 200 ms one by one.
_SYNC_THREADS = 8
# A folder may be writable but not readable. Some file systems sync no folders.
_NO_FOLDER_SYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP)
# What the system reports, without a name, where a disk or a limit takes no more of a file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def recover(output: Path, kind: ManifestFile) -> None:
    """Move the folder `output` back if a process was killed after it moved the folder away.

    Raises `kind.error` if another process is writing the folder, and if it cannot be moved back.
    """
    if not os.path.lexists(output) and os.path.isdir(beside(output, "partial")):  # noqa: PTH112  (no OSError)
        with staging(output, "partial", kind) as place:
            _restore(place, output, kind)


def check_replaceable(output: Path, kind: ManifestFile, *, force: bool) -> None:
    """Reject an `output` that cannot become a new folder. Raises `kind.error`.

    Anything at `output` must be a folder of this kind with no files but those that its manifest lists, and `force`
    must be given.
    """
    text = str(output)
    if "\0" in text:
        raise kind.error(f"the name {text!a} holds a NUL. Choose another.")
    if text != text.encode(errors="replace").decode():
        raise kind.error(f"the name {text!a} is not UTF-8. Choose another.")
    if output.name in ("", ".."):
        raise kind.error(f"'{output}' names no new folder. Give it a name, as in '{output / kind.folder}'.")
    above = next(folder for folder in output.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise kind.error(f"'{output}' cannot be written: '{above}' is no folder. Choose another place.")
    recover(output, kind)
    _check_replaceable(output, kind, force=force)


def _check_replaceable(output: Path, kind: ManifestFile, *, force: bool) -> None:
    try:
        with suppress(FileNotFoundError):
            # Its name is longer, and may be too long.
            beside(output, "partial").lstat()
        mode = output.lstat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise unwritable(output, kind, error) from error
    if stat.S_ISLNK(mode):
        raise kind.error(
            f"'{output}' is a link to '{output.readlink()}'. Give the folder itself, or choose another place; "
            "it is left as it is."
        )
    try:
        strangers = unlisted_files(output, kind)
    except UnreadableError as error:
        raise kind.error(
            f"'{output}' exists and is not {kind.a_folder}: its {kind.name} {error}. Choose another place; "
            "it is left as it is."
        ) from error
    if not force:
        raise kind.error(
            f"'{output}' is {kind.a_folder} already. Add --force to replace it, or choose another place."
        )
    if strangers:
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
        wanted, left = compared_sizes(needed, free)
        raise kind.error(
            f"no room for the {kind.folder}: {wanted} are needed, '{folder}' has {left} free. "
            f"Free space, choose another place, or {way_out}."
        )


@contextmanager
def replacing(output: Path, kind: ManifestFile, needed: int, way_out: str, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder with `needed` bytes free, which becomes `output` at the end of the block.

    The block writes a manifest of this `kind` that lists all other files. If anything fails, `output` stays as it was
    and the temporary folder is removed, as is that of a killed process. `way_out` completes the message about a full
    disk with a way to need less. Raises `kind.error`, also for what `check_replaceable` rejects.
    """
    check_replaceable(output, kind, force=force)
    with made_parents(output, kind), staging(output, "partial", kind) as place, naming_full(output):
        new = place / "new"
        _clear(place, output, kind)
        try:
            check_room(output, needed, kind, way_out)
            new.mkdir()
            yield new
            sync_tree(new)
            # Hours may have passed since the first check.
            _check_replaceable(output, kind, force=force)
            try:
                if os.path.lexists(output):
                    output.absolute().rename(place / "old")
                new.rename(output)
            except OSError as error:
                raise unwritable(output, kind, error) from error
            # The disk must hold the new name before old files are removed.
            sync_folder(place)
            sync_folder(output.absolute().parent)
        finally:
            _clear(place, output, kind)


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


@contextmanager
def staging(output: Path, suffix: str, kind: ManifestFile) -> Iterator[Path]:
    """Make the folder `.NAME.suffix` next to `output`, lock it for the block, and then remove it if it is empty.

    The system releases the lock when the process ends, however it ends. Raises `kind.error` if another process holds
    the lock, and for a folder of another user.
    """
    place = beside(output, suffix)
    try:
        made = not place.is_dir()
        place.mkdir(exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise unwritable(output, kind, error) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise kind.error(
                f"'{place}' is not a folder of your own, and the command needs that place. Move it away."
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.path.samestat(found, place.stat())
        except OSError as error:
            # A file system may have no locks, and then only a new folder is certainly of this process.
            held = made and not isinstance(error, BlockingIOError)
        if not held:
            raise kind.error(
                f"another command is writing '{output}'. Wait for it, or choose another place. If none is running, "
                f"remove '{place}'."
            )
        try:
            yield place
        finally:
            with suppress(OSError):
                place.rmdir()
    finally:
        os.close(descriptor)


def unlisted_files(folder: Path, kind: ManifestFile) -> list[str]:
    """Return the paths of everything in `folder` but folders and the regular files that its manifest lists.

    The manifest may have any format version. Raises `UnreadableError` for a manifest that sinkprune did not write;
    the message follows the manifest's name.
    """
    data = read_json(folder / kind.name, follow_links=False)
    if not isinstance(data, dict) or "sinkprune_version" not in data or not isinstance(data.get("files"), dict):
        raise UnreadableError("is none of sinkprune's: it lacks `sinkprune_version` or `files`")
    return kind.unlisted(folder, data["files"])


def beside(output: Path, suffix: str) -> Path:
    """Return the path of the folder `.NAME.suffix` next to the folder `output`."""
    place = output.absolute()
    return place.parent / f".{place.name}.{suffix}"


def first_names(names: list[str]) -> str:
    """Return up to three of `names` in quotes, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def unwritable(output: Path, kind: ManifestFile, error: OSError | ValueError) -> Exception:
    """Return the `kind.error` for a folder `output` that the system refused with `error`."""
    found = f"{getattr(error, 'strerror', None) or error} in '{output.absolute().parent}'"
    return kind.error(f"'{output}' cannot be written: {found}. Choose a place you may write to.")


@contextmanager
def naming_full(place: Path) -> Iterator[None]:
    """Name `place` in an error of the block that a disk or a limit takes no more."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            error.filename = str(place)
        raise


def sync_tree(root: Path) -> None:
    """Wait until the disk holds the folder `root` and everything below it. Raises `OSError`."""
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        # list() raises what a thread raised.
        list(pool.map(lambda path: sync_folder(path) if path.is_dir() else _sync(path), (root, *root.rglob("*"))))


def sync_folder(folder: Path) -> None:
    """Wait until the disk holds the names in `folder`; their contents may follow later. Raises `OSError`."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _restore(place: Path, output: Path, kind: ManifestFile) -> None:
    """Move the old folder back if the new one did not come into its place."""
    old = place / "old"
    if os.path.lexists(old) and os.path.lexists(place / "new"):
        try:
            if os.path.lexists(output):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            old.rename(output)
            sync_folder(output.absolute().parent)
        except OSError as error:
            raise kind.error(
                f"the {kind.folder} that stood at '{output}' lies in '{old}' and cannot be put back: "
                f"{error.strerror}. Move it where you want it, then remove '{place}'."
            ) from error


def _clear(place: Path, output: Path, kind: ManifestFile) -> None:
    """Remove what a finished, failed or killed process left in its staging folder."""
    _restore(place, output, kind)
    try:
        for part in (place / "new", place / "old"):
            if os.path.lexists(part):
                shutil.rmtree(part)
    except OSError as error:
        raise kind.error(f"'{place}' cannot be removed: {error.strerror or error}. Remove it by hand.") from error
