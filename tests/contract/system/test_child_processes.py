"""No child process runs anything in the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinkprune.contract.child_processes import find_program, python_command
from sinkprune.jetson import host as python_environment


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
    assert (done.stdout, trap.exists()) == ('["a", "b"]\n', False)
    subprocess.run([sys.executable, "-c", "import json"], check=True)
    assert trap.exists(), "the trap does not work"


def test_looking_for_libraries_imports_nothing_from_the_current_folder(trap: Path) -> None:
    libraries = python_environment.this_environment().libraries
    assert libraries["onnxruntime"].error is None
    assert not trap.exists()


@pytest.mark.parametrize("entry", ["", ".", "here", "../here"])
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
