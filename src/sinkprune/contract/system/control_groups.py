"""The control groups (cgroups, version 1 or 2) that limit this process."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
_GROUPS = Path("proc/self/cgroup")
_MOUNTS = Path("proc/self/mountinfo")
# Kernels write a space or a backslash of a path as a backslash and three octal digits.
_ESCAPED = re.compile(r"\\([0-7]{3})")


class ControlGroup(NamedTuple):
    """A control group of this process."""

    folder: Path
    """The folder of the group's files."""
    version: int
    """1 or 2, which determines the names and units of the files."""

    def numbers(self, file: str) -> list[int | None]:
        """Return the whole numbers in a file of the group, None for each "max"; empty without the file."""
        words = " ".join(_lines(self.folder / file)).split()
        return [int(word) if word.isdecimal() else None for word in words]

    def named(self, file: str) -> dict[str, int]:
        """Return the lines "name number" of a file of the group; empty without the file."""
        words = [line.split() for line in _lines(self.folder / file)]
        return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def control_groups(controller: str, root: Path = ROOT) -> list[ControlGroup]:
    """Return the groups whose `controller` ("cpu" or "memory") limits this process: its own first, then all above.

    A container sees its own group and those below; groups above are hidden from it. Empty where the system has no
    control groups. The system's files are read below `root`.
    """
    found = []
    for version, mounted, mount_point in _mounts(controller, root):
        own = _own_group(controller, version, root)
        if own is None:
            continue
        below = own.relative_to(mounted) if own.is_relative_to(mounted) else PurePosixPath()
        folder = root / mount_point.relative_to("/")
        for part in (below, *below.parents):
            group = ControlGroup(folder / part, version)
            if group not in found:
                found.append(group)
    return found


def _mounts(controller: str, root: Path) -> list[tuple[int, PurePosixPath, PurePosixPath]]:
    """Return the hierarchies that may hold `controller`: version, mounted group, and mount point."""
    mounts = []
    for line in _lines(root / _MOUNTS):
        fields, _, rest = line.partition(" - ")
        kind, options = rest.split(" ")[0], rest.split(" ")[-1].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and controller in options):
            group, point = (PurePosixPath(_unescaped(field)) for field in fields.split(" ")[3:5])
            mounts.append((2 if kind == "cgroup2" else 1, group, point))
    return mounts


def _own_group(controller: str, version: int, root: Path) -> PurePosixPath | None:
    for line in _lines(root / _GROUPS):
        number, controllers, path = line.split(":", 2)
        if (number == "0" and not controllers) if version == 2 else controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), field)
