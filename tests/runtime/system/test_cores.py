"""The cores that CPU quotas of control groups leave this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinkprune.runtime.system import usable_cores
from support.stand_ins.group_trees import group_tree, real_group, version_1, version_2

# Takes its own process into the group whose file of members is its argument.
IN_GROUP = """
import sys
from pathlib import Path
from sinkprune.runtime.system import usable_cores
Path(sys.argv[1]).write_text("0")
print(usable_cores())
"""


@pytest.fixture(autouse=True)
def eight_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernel" not in request.function.__name__:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def test_without_groups_every_core_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    assert usable_cores(group_tree(tmp_path, "", "", {})) == 8


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("max 100000", 8),
        ("900000 100000", 8),
        ("", 8),
    ],
)
@pytest.mark.parametrize("folder", ["", "robots.slice/", "robots.slice/arm.service/"])
def test_the_quota_of_every_group_limits(quota: str, cores: int, folder: str, tmp_path: Path) -> None:
    files = {f"{folder}cpu.max": f"{quota}\n"}
    assert usable_cores(version_2(tmp_path, "/robots.slice/arm.service", files)) == cores


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 8)])
def test_version_1(controllers: str, quota: str, cores: int, tmp_path: Path) -> None:
    files = {"docker/cpu.cfs_quota_us": f"{quota}\n", "docker/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(version_1(tmp_path, controllers, "/docker/abc", files)) == cores


def test_a_group_of_this_kernel_limits() -> None:
    with real_group("cpu") as folder:
        found = []
        for quota in (-1, 50_000):
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            command = [sys.executable, "-c", IN_GROUP, str(folder / "cgroup.procs")]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found.append(int(done.stdout))
        assert found == [len(os.sched_getaffinity(0)), 1]
