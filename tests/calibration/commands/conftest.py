"""The bundle and the machine of tests of `sinkprune-calibrate schedule`."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.calibration import questions, schedule_search
from sinkprune.deadlines import costs as costs_model
from sinkprune.demo.write_scenes import write_scenes


@pytest.fixture
def own(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle that may be written to."""
    return Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about two scenes, next to their pictures."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder, 2, "validation")
    return folder / "scenes.jsonl"


@pytest.fixture
def no_note_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs the tests."""
    monkeypatch.setattr(costs_model, "LOADED", 1.0)


@pytest.fixture
def any_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept all predictions, however the speed of the machine changes that runs the tests."""
    monkeypatch.setattr(schedule_search, "NEAR", math.inf)


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scenes and every third sanitizer: test_schedule_attention.py has the choice among all."""
    sanitizers = schedule_search.sanitizers
    monkeypatch.setattr(questions, "PICTURES", 2)
    monkeypatch.setattr(schedule_search, "sanitizers", lambda manifest: sanitizers(manifest)[::3])


@pytest.fixture(autouse=True)
def any_attention_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of random weights is spread over all tokens, so that small budgets drop most of it."""
    monkeypatch.setattr(schedule_search, "_MOST_LOST", 1.0)
