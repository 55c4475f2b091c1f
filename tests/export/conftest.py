"""Copies of small checkpoints, for tests that change them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.models.quantised_checkpoints import Layout, Made, make_quantised


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a small checkpoint in the test's folder. `changes` are fields of its JSON files, by their stems."""

    def get(name: str, **changes: dict[str, Any]) -> Path:
        folder = Path(shutil.copytree(checkpoint(name), tmp_path / "checkpoint"))
        for stem, fields in changes.items():
            path = folder / f"{stem}.json"
            content = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**content, **fields}))
        return folder

    return get


@pytest.fixture(scope="session")
def quantised(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """A small checkpoint, quantised. Tests must not write into it."""
    found: dict[tuple[str, Layout], Made] = {}

    def get(layout: Layout, name: str = "gqa-112") -> Made:
        if (name, layout) not in found:
            found[name, layout] = make_quantised(checkpoint(name), tmp_path_factory.mktemp("made"), layout)
        return found[name, layout]

    return get
