"""The files that a folder's manifest lists. Only these may be replaced or removed.

Links are never followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from sinkprune.contract.files.manifest_file import ManifestFile
from sinkprune.contract.files.untrusted import UnreadableError, read_json

# More than any folder of sinkprune needs, and far less than the stack allows.
_DEPTH = 32


class ListedPaths(NamedTuple):
    """Paths relative to a folder, with `/` between their parts."""

    files: frozenset[str] = frozenset()
    folders: frozenset[str] = frozenset()
    """All folders above `files`."""


def listed_files(folder: Path, kind: ManifestFile) -> ListedPaths:
    """Return the files in the manifest of `folder`, with the manifest and its signature, in any format version.

    Raises `UnreadableError` for a manifest that sinkprune did not write; the message follows the manifest's name.
    """
    data = read_json(folder / kind.name, follow_links=False)
    if not (
        isinstance(data, dict)
        and type(data.get("format_version")) is int
        and isinstance(data.get("sinkprune_version"), str)
        and isinstance(data.get("files"), dict)
    ):
        raise UnreadableError(
            "is none of sinkprune's: it lacks an integer `format_version`, the text `sinkprune_version` or `files`"
        )
    files = frozenset((kind.name, kind.signature, *data["files"]))
    folders = frozenset(str(above) for name in files for above in PurePosixPath(name).parents[:-1])
    for name in files:
        path = PurePosixPath(name)
        if str(path) != name or path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
            raise UnreadableError(f"lists {name[:100]!r}, which is no path within the {kind.folder}")
        if name in folders or len(path.parts) > _DEPTH:
            raise UnreadableError(f"lists {name[:100]!r}, which cannot be the name of a file of the {kind.folder}")
    return ListedPaths(files, folders)


def unlisted_paths(folder: Path, listed: ListedPaths, below: str = "") -> Iterator[str]:
    """Yield the path of everything in `folder` that is not `listed`: files, folders, links, FIFOs.

    `below` is empty, or the path of a listed folder with a `/` at its end: then only this folder is searched.
    """
    with os.scandir(folder / below) as entries:
        for entry in entries:
            path = below + entry.name
            if path in listed.folders and entry.is_dir(follow_symlinks=False):
                yield from unlisted_paths(folder, listed, f"{path}/")
            elif path not in listed.files or not entry.is_file(follow_symlinks=False):
                yield path


def remove_listed(folder: Path, kind: ManifestFile) -> list[str]:
    """Remove the files that the manifest of `folder` lists, then the folders that are empty. Return what is left.

    The manifest is removed last, and only if nothing else is left, so that an interrupted removal can be finished.
    Raises `OSError`.
    """
    try:
        listed = listed_files(folder, kind)
    except UnreadableError:
        listed = ListedPaths()
    # Open folders are safe to remove from even if they are moved or replaced by links meanwhile.
    for root, folders, files, descriptor in os.fwalk(folder, topdown=False):
        below = Path(root).relative_to(folder)
        for name in files:
            path = str(below / name)
            if path in listed.files and path != kind.name:
                with suppress(FileNotFoundError):
                    if stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                        os.unlink(name, dir_fd=descriptor)
        for name in folders:
            if str(below / name) in listed.folders:
                # A folder that is not empty stays.
                with suppress(OSError):
                    os.rmdir(name, dir_fd=descriptor)
    manifest = listed.files & {kind.name}
    left = sorted(unlisted_paths(folder, ListedPaths(manifest, listed.folders)))
    if not left:
        (folder / kind.name).unlink(missing_ok=True)
        folder.rmdir()
    return left
