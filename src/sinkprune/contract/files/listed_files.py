"""What of a folder its manifest lists: that, and nothing else, is ours to replace or to remove.

Nothing here follows a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sinkprune.contract.files.manifest_file import ManifestFile
from sinkprune.contract.files.untrusted import UnreadableError, read_json

Tree = dict[str, "Tree | None"]
"""Names in a folder: what is in those that are folders, None for those that are files."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Deeper than any of ours, and far from where the stack ends.
_DEPTH = 32


def listed_files(folder: Path, kind: ManifestFile) -> Tree:
    """The files of `folder`: those its manifest lists, whatever its format version, itself and its signature.

    Raises `UnreadableError`, in words that go on from the manifest's name, for one that does not read as ours.
    """
    data = read_json(folder / kind.name, follow_links=False)
    if not _is_ours(data):
        raise UnreadableError(
            "is none of sinkprune's: it lacks an integer `format_version`, the text `sinkprune_version` or `files`"
        )
    tree: Tree = {}
    for name in (kind.name, f"{kind.name}.sig", *data["files"]):
        *above, file = name.split("/")
        place: Tree | None = tree
        for part in above:
            place = place.setdefault(part, {}) if place is not None else None
        if len(above) >= _DEPTH or place is None or place.setdefault(file, None) is not None:
            raise UnreadableError(f"lists {name[:100]!r}, which cannot be the name of a file of the {kind.folder}")
        if any(part in ("", ".", "..") or "\0" in part for part in (*above, file)):
            raise UnreadableError(f"lists {name[:100]!r}, which is no path within the {kind.folder}")
    return tree


def unlisted(folder: Path, tree: Tree) -> Iterator[str]:
    """What lies in `folder` and is not in `tree`, by its path in `folder`: files, folders, links, anything."""
    with os.scandir(folder) as entries:
        for entry in entries:
            below = tree.get(entry.name)
            if below is not None and entry.is_dir(follow_symlinks=False):
                yield from (f"{entry.name}/{name}" for name in unlisted(folder / entry.name, below))
            elif below is not None or entry.name not in tree or not entry.is_file(follow_symlinks=False):
                yield entry.name


def remove_listed(folder: Path, kind: ManifestFile) -> list[str]:
    """Remove the files that the manifest of `folder` lists, then the folders that are empty.

    Returns what is left, by its path in `folder`. The manifest goes last, and only when nothing is left: what was
    begun can be ended. Raises `OSError`.
    """
    try:
        tree = listed_files(folder, kind)
    except UnreadableError:
        tree = {}
    manifest = {name: tree.pop(name) for name in (kind.name,) if name in tree}
    descriptor = os.open(folder, _FOLDER)
    try:
        _remove(descriptor, tree)
        left = sorted(unlisted(folder, tree | manifest))
        if not left:
            _remove(descriptor, manifest)
            folder.rmdir()
    finally:
        os.close(descriptor)
    return left


def _remove(folder: int, tree: Tree) -> None:
    """Remove the files of `tree` from an open folder, and nothing else even if folders are moved meanwhile."""
    for name, below in tree.items():
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if below is None and stat.S_ISREG(mode):
                os.unlink(name, dir_fd=folder)
            elif below is not None and stat.S_ISDIR(mode):
                inner = os.open(name, _FOLDER, dir_fd=folder)
                try:
                    _remove(inner, below)
                finally:
                    os.close(inner)
                # One that still holds something stays.
                with suppress(OSError):
                    os.rmdir(name, dir_fd=folder)


def _is_ours(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and type(data.get("format_version")) is int
        and isinstance(data.get("sinkprune_version"), str)
        and isinstance(data.get("files"), dict)
    )
