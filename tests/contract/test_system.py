"""Child processes run nothing in the current folder; control groups leave this process less memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinkprune.contract.child_processes import find_program, python_command
from sinkprune.contract.memory import available_bytes, control_groups
from sinkprune.jetson import host as python_environment
from support.stand_ins.group_trees import group_tree, real_group, version_1, version_2


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a planted `json.py` or `numpy.py` in the current folder writes when it is imported."""
    written = tmp_path / "imported"
    (tmp_path / "here").mkdir()
    for name in ("json.py", "numpy.py"):
        (tmp_path / "here" / name).write_text(f"open({str(written)!r}, 'w').close()")
    monkeypatch.chdir(tmp_path / "here")
    return written


def test_a_child_interpreter_imports_nothing_from_the_current_folder(trap: Path) -> None:
    program = "import json, numpy; print(json.dumps(sys.argv[1:]))"
    done = subprocess.run(python_command(program, "a", "b"), capture_output=True, text=True, check=True)
    assert python_environment.this_environment().libraries["onnxruntime"].error is None
    assert (done.stdout, trap.exists()) == ('["a", "b"]\n', False)
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    assert trap.exists(), "the trap does not work"


@pytest.mark.parametrize("entry", ["", "here"])
def test_a_program_in_the_current_folder_is_not_found(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "here", tmp_path / "named"):
        folder.mkdir(exist_ok=True)
        (folder / "tegrastats").write_text("#!/bin/sh\n")
        (folder / "tegrastats").chmod(0o755)
    monkeypatch.setenv("PATH", entry)
    assert find_program("tegrastats") is None
    monkeypatch.setenv("PATH", os.pathsep.join([entry, str(tmp_path / "named")]))
    assert find_program("tegrastats") == str(tmp_path / "named" / "tegrastats")


GIB = 1 << 30
SLICE = "system.slice/robot-a\\x2db.service"


def limited(most: int | str, taken: int, cached: int = 0, shared: int = 0) -> dict[str, str]:
    """Return the files of a group of version 2."""
    stat = f"anon {taken - cached}\nfile {cached}\nkernel_stack 16384\nshmem {shared}\n"
    return {"memory.max": f"{most}\n", "memory.current": f"{taken}\n", "memory.stat": stat}


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_bytes(group_tree(tmp_path, "", "", {})) == 60 * GIB
    for name in ("cgroup", "mountinfo"):
        (tmp_path / "proc/self" / name).unlink()
    assert control_groups("memory", tmp_path) == []
    assert available_bytes(tmp_path) == 60 * GIB


VERSION_2: dict[str, tuple[int, str, dict[str, str]]] = {
    "own group": (
        6,
        f"/{SLICE}",
        within(SLICE, limited(8 * GIB, 3 * GIB, GIB)) | within("system.slice", limited("max", 5 * GIB)),
    ),
    "group above": (
        2,
        f"/{SLICE}",
        within(SLICE, limited(8 * GIB, GIB)) | within("system.slice", limited(9 * GIB, 7 * GIB)),
    ),
    "no group next to it": (60, "/a", within("a", limited("max", GIB)) | within("b", limited(2 * GIB, GIB))),
    "a container's root": (3, "/", limited(4 * GIB, GIB)),
    "memory.high": (1, "/", {**limited(8 * GIB, GIB), "memory.high": f"{2 * GIB}\n"}),
    "shared memory is not cached": (4, "/", limited(8 * GIB, 5 * GIB, 4 * GIB, 3 * GIB)),
    "over the limit": (0, "/", limited(GIB, 2 * GIB)),
    **{
        f"{name} of {content!r}": (60, "/", {**limited(GIB, 0), name: content})
        for name in ("memory.max", "memory.current")
        for content in ("", "many\n", "-1\n", "\x00\n")
    },
}


@pytest.mark.parametrize(("gibibytes", "own", "files"), VERSION_2.values(), ids=VERSION_2)
def test_the_memory_left_by_groups_of_version_2(
    gibibytes: int, own: str, files: dict[str, str], tmp_path: Path
) -> None:
    assert available_bytes(version_2(tmp_path, own, files)) == gibibytes * GIB


@pytest.mark.parametrize("own", ["/docker/abc", "/../other", "/elsewhere"])
def test_a_group_that_is_mounted_alone_limits(own: str, tmp_path: Path) -> None:
    assert available_bytes(version_2(tmp_path, own, limited(4 * GIB, GIB), mounted="/docker/abc")) == 3 * GIB


@pytest.mark.parametrize("limited_group", ["", "docker/", "docker/abc/"])
def test_every_group_of_version_1_limits(limited_group: str, tmp_path: Path) -> None:
    files = {
        f"{limited_group}memory.limit_in_bytes": f"{6 * GIB}\n",
        f"{limited_group}memory.usage_in_bytes": f"{4 * GIB}\n",
        f"{limited_group}memory.stat": f"cache 5\ntotal_cache {2 * GIB}\ntotal_shmem {GIB}\n",
    }
    assert available_bytes(version_1(tmp_path, "memory", "/docker/abc", files)) == 3 * GIB


def test_a_group_of_this_kernel_limits(tmp_path: Path) -> None:
    with real_group("memory") as folder:
        (folder / "memory.limit_in_bytes").write_text(str(GIB))
        group_tree(tmp_path, f"4:memory:/{folder.name}\n", Path("/proc/self/mountinfo").read_text(), {})
        (tmp_path / "sys/fs").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup").symlink_to("/sys/fs/cgroup")
        assert available_bytes(tmp_path) == GIB
