"""The bundle and the machine of tests of `sinkprune-calibrate schedule`."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.calibration import questions
from sinkprune.calibration.scheduling import propose, report
from sinkprune.deadlines import costs as costs_model


@pytest.fixture
def own(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle that may be written to."""
    return Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))


@pytest.fixture
def no_note_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is that runs the tests."""
    monkeypatch.setattr(costs_model, "LOADED", 1.0)


@pytest.fixture
def any_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept all predictions, however the speed of the machine changes that runs the tests."""
    monkeypatch.setattr(report, "NEAR", math.inf)


@pytest.fixture(autouse=True)
def few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scenes and every third sanitizer: the choice among all is that of tests/calibration/scheduling."""
    sanitizers = propose.sanitizers
    monkeypatch.setattr(questions, "PICTURES", 2)
    monkeypatch.setattr(propose, "sanitizers", lambda manifest: sanitizers(manifest)[::3])


@pytest.fixture(autouse=True)
def any_attention_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of random weights is spread over all tokens, so that small budgets drop most of it."""
    monkeypatch.setattr(report, "_MOST_LOST", 1.0)
