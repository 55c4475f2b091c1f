"""Questions that the commands which measure a model are asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinkprune.demo.write_scenes import write_scenes


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about two scenes, next to their pictures."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, 2, "validation")
    return folder / "scenes.jsonl"
