"""What commands print about answers that are cut off, or late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.deadlines.options import late_line
from sinkprune.deadlines.policy import DeadlinePolicy
from sinkprune.runtime.steps.answer import DeadlineReport
from support.programs.commands import run


@pytest.mark.parametrize("finish", ["deadline", ""])
def test_a_closed_list_that_is_cut_off_is_noted(
    finish: str, bundle: Callable[..., Path], photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first tokens decide, so the confidence is not that of whole answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(DeadlinePolicy, "finish", lambda self, tokens: finish)
    choices = ("--choice", "the cup", "--choice", "a table")
    words = ("--prompt", "What?", *choices, "--deadline-ms", 60_000, "--warm-up")
    done = run("sinkprune-run", bundle("gqa-112"), "--image", photo_file, *words)
    assert done.code == 0, done.stderr
    assert ("; cut off after 1 token (--deadline-ms)" in done.stdout) == bool(finish)
    assert ("only the first token of each was compared" in done.stderr) == bool(finish)


@pytest.mark.parametrize(
    ("measured", "said"), [(20.4, "20.4"), (20.6, "21"), (20.04, "20.04"), (20.0000004, "20.0000004"), (35.2, "35")]
)
def test_a_late_answer_looks_late(measured: float, said: str) -> None:
    common: dict[str, Any] = {"deadline_ms": 20.0, "budget": "none", "reason": "", "can_meet": True, "met": False}
    times = {"predicted_first_ms": 9.0, "first_ms": 9.0, "predicted_ms": 9.0, "measured_ms": measured}
    report = DeadlineReport(**common, **times, expected_tokens=1, slower=1.0, costs_age_s=None, costs_load=None)
    assert late_line(report) == f"late: {said} ms where 20 were given, at budget none.\n"
