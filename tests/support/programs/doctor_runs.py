"""Runs `sinkprune-doctor`, also in the Python of a board."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sinkprune.jetson import doctor as doctor_command
from sinkprune.jetson.boards import Board, preset_manifest, read_boards, read_presets
from sinkprune.jetson.fit import ModelFit, TargetMachine, fit
from support.programs.commands import Outcome, run
from support.stand_ins.board_trees import PYTHON_OF_JETPACK_6

NANO = read_boards().board("orin-nano-8gb")
PICTURE = (640, 480)


def doctor(*arguments: object) -> Outcome:
    return run("sinkprune-doctor", *arguments)


def told(*arguments: object) -> Any:
    done = doctor(*arguments, "--json")
    assert done.code == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def set_python(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Run the command in a Python of this version, with a board's TensorRT."""
    python = replace(PYTHON_OF_JETPACK_6, version=version)
    monkeypatch.setattr(doctor_command, "this_environment", lambda: python)


def preset(name: str, board: Board | None = NANO, usable: int = 0) -> ModelFit:
    """Return the fit of a preset on a board with `usable` bytes of memory for programs; 0 means unknown."""
    manifest = preset_manifest(name, read_presets()[name], "opset20")
    return fit(name, "preset", manifest, TargetMachine("tensorrt", usable, board), PICTURE)
