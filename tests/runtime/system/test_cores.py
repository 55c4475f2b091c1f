"""The cores that CPU quotas of control groups leave this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sinkprune.runtime.system import usable_cores
from support.stand_ins.group_trees import version_1, version_2


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 2), ("1000 100000", 1), ("max 100000", 8), ("900000 100000", 8), ("", 8)]
)
@pytest.mark.parametrize("folder", ["robots.slice/", "robots.slice/arm.service/"])
def test_the_quota_of_every_group_limits(quota: str, cores: int, folder: str, tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    files = {f"{folder}cpu.max": f"{quota}\n"}
    assert usable_cores(version_2(tmp_path, "/robots.slice/arm.service", files)) == cores


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 8)])
def test_version_1(controllers: str, quota: str, cores: int, tmp_path: Path) -> None:
    files = {"docker/cpu.cfs_quota_us": f"{quota}\n", "docker/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(version_1(tmp_path, controllers, "/docker/abc", files)) == cores
