"""Trees that hold what a system tells a process about its control groups, and a real group of the kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest

VERSION_2 = "29 23 0:26 {group} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = "33 31 0:30 {group} /sys/fs/cgroup/{name} rw,relatime shared:9 - cgroup cgroup rw,{name}\n"
OTHERS = "22 1 259:1 / / rw - ext4 /dev/root rw\n"
OTHERS += "30 23 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"


def group_tree(root: Path, own: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A process in the groups `own`, the lines of /proc/self/cgroup, under `mounts`; `files` by place and content."""
    for name, content in {
        "proc/self/cgroup": own,
        "proc/self/mountinfo": OTHERS + mounts,
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def version_2(root: Path, own: str, files: Mapping[str, str], mounted: str = "/") -> Path:
    """A process in group `own` of version 2; `files` by their place below /sys/fs/cgroup."""
    placed = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    return group_tree(root, f"1:name=systemd:/\n0::{own}\n", VERSION_2.format(group=mounted), placed)


def version_1(root: Path, controllers: str, own: str, files: Mapping[str, str], mounted: str = "/") -> Path:
    """A process in group `own` of the `controllers` of version 1, beside a version 2 that limits nothing."""
    placed = {f"sys/fs/cgroup/{controllers}/{name}": content for name, content in files.items()}
    mounts = VERSION_1.format(group=mounted, name=controllers) + VERSION_2.format(group="/")
    mounts = mounts.replace(" /sys/fs/cgroup rw", " /sys/fs/cgroup/unified rw")
    return group_tree(root, f"4:{controllers}:{own}\n1:name=systemd:/\n0::/\n", mounts, placed)


@contextmanager
def real_group(controller: str) -> Iterator[Path]:
    """A new, empty group of the kernel's, of version 1; the test is skipped where none can be made."""
    try:
        folder = Path(mkdtemp(prefix="sinkprune-test-", dir=f"/sys/fs/cgroup/{controller}"))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()
