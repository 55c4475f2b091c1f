"""Killed at any moment of a replacing, the next command finds the old folder or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs.repository import ROOT

MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory if possible: syncing the disk does not matter for kills."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


def test_killed_at_every_call_of_the_system(folder: Path) -> None:
    command = [sys.executable, "-m", "support.programs.kill_replacing", str(folder)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    *killed, last = found
    assert not last["killed"] and all(each["killed"] for each in killed)
    assert len(killed) > 100
    # First the old folder, then the new one.
    turn = [each["found"] for each in killed].index("new")
    assert {each["found"] for each in killed[:turn]} == {"old"}
    assert {each["found"] for each in killed[turn:]} == {"new"}
    assert all(each["left"] == ["bundle"] for each in found)
    # Between two renames there are moments when only the next command can put it back.
    assert any(not each["seen"] for each in found)
