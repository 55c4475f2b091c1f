"""Files that commands write, beside their place and then into it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import BinaryIO

from sinkprune.contract.errors import OutputError

OutputFile = tuple[Path, tuple[str, ...]]
"""A file that a command writes, and the suffixes it may have."""


def check_outputs(outputs: Sequence[OutputFile], read: Iterable[Path] = (), folders: Iterable[Path] = ()) -> None:
    """Reject outputs that cannot be written, or that would replace an input. Raises `OutputError`.

    An output may not be one of the files in `read`, lie in one of `folders` or in any bundle, or be the same file as
    another output. Links and hard links are followed.
    """
    for path, suffixes in outputs:
        check_writable(path, suffixes)
    paths = [path for path, _ in outputs]
    check_apart(paths, read)
    kept = {found: folder for folder in folders if (found := _identity(folder))}
    for path in paths:
        for found in map(_identity, path.resolve().parents):
            if found in kept:
                raise OutputError(f"'{path}' lies in '{kept[found]}', which is read. Choose a place outside it.")
        check_in_no_bundle(path)
    for one, other in combinations(paths, 2):
        if one.resolve() == other.resolve() or (_identity(one) or one) == (_identity(other) or other):
            raise OutputError(f"'{one}' and '{other}' are the same file. Give each output a name of its own.")


def check_apart(outputs: Iterable[Path], read: Iterable[Path]) -> None:
    """Reject outputs that are among the files in `read`, also by links. Raises `OutputError`."""
    existing = {found: path for path in outputs if (found := _identity(path))}
    for path in read if existing else ():
        found = _identity(path)
        if found in existing:
            raise OutputError(f"'{existing[found]}' would be overwritten, and it is read. Give another name.")


def check_writable(path: Path, suffixes: tuple[str, ...]) -> None:
    """Reject a file that cannot be written. Raises `OutputError`.

    The suffix must be one of `suffixes`. The folder must exist and be writable. An existing file must be a regular
    file and no link.
    """
    if path.suffix.lower() not in suffixes:
        raise OutputError(f"'{path}' ends in '{path.suffix}', expected {' or '.join(suffixes)}.")
    check_place(path)


def check_place(path: Path) -> None:
    """Reject a file that cannot be written, as `check_writable` does, with any suffix. Raises `OutputError`."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        found = "a folder stands there" if path.is_dir() else f"there is no folder '{path.parent}'"
        raise OutputError(f"'{path}' cannot be written: {found}. Give another name, or make the folder first.")
    if path.is_symlink():
        raise OutputError(f"'{path}' is a link. Give the name of the file itself, or remove the link.")
    if path.exists() and not path.is_file():
        raise OutputError(f"'{path}' is a FIFO, a socket or a device, expected a regular file. Give another name.")
    if not os.access(path.absolute().parent, os.W_OK):
        raise OutputError(
            f"'{path}' cannot be written: no permission, or a read-only file system, at '{path.absolute().parent}'."
        )


def check_in_no_bundle(path: Path) -> None:
    """Reject a place within a bundle or engines, which may hold no other files. Raises `OutputError`."""
    for folder in path.resolve().parents:
        for manifest in ("bundle.json", "engines.json"):
            if (folder / manifest).exists():
                raise OutputError(
                    f"'{path}' lies in '{folder}', whose {manifest} lists all its files. Choose a place outside it."
                )


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it exists. Raises `OutputError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"'{folder}' cannot be made: {error.strerror}. Choose another place.") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to a temporary file next to `path`, sync it, and rename it to `path`. Raises as `whole_file`."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path` for writing. At the end of the block it is synced and renamed to `path`.

    If the block raises, the temporary file is removed. Raises `OutputError` if it cannot be made, and `OSError` with
    the name of the file if it cannot be written, as on a full disk.
    """
    temporary = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        # Module tempfile would ignore the umask, and make a file for this user alone.
        opened = temporary.open("xb")
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror}. Choose another place.") from error
    try:
        with opened as file:
            yield file
            file.flush()
            # Otherwise a power cut may leave an empty file under the new name.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # Errors of a full disk name no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        # It has its own name by now, or is incomplete.
        temporary.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file at a path, after links; None if there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino
