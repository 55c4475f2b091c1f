"""`sinkprune-run --deadline-ms`: costs are known before anything is loaded, and the first request does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.deadlines.options import late_line
from sinkprune.runtime.steps.request import Request
from support.programs.commands import assert_refused, interrupt_after, run, succeed

Bundles = Callable[..., Path]


@pytest.fixture
def ask(bundle: Bundles, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--prompt", "What?", "--max-new-tokens", 2, "--deadline-ms", 60_000)
    return ("sinkprune-run", bundle("gqa-112"), "--image", photo_file, *words)


def test_missing_costs_are_an_error_before_anything_is_loaded(
    ask: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pipeline, "measure_costs", interrupt_after(0, Pipeline.measure_costs))
    outcome = run(*ask, "--warm-up")
    assert outcome.code == 130
    assert outcome.stderr.endswith("interrupted; no costs were kept: they need all rounds of the measurement.\n")
    monkeypatch.setattr(Pipeline, "load", interrupt_after(0, Pipeline.load))
    assert_refused(run(*ask), "are not known. Measure them", "--warm-up", "--costs FILE.json")
    assert_refused(run(*ask, "--costs", tmp_path / "none.json"), "none.json")


def test_the_first_request_of_the_process_does_not_count(
    ask: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed(*ask, "--warm-up")
    asked, answer = list[Request](), Pipeline.answer

    def noting(pipeline: Pipeline, request: Request, *more: Any) -> Any:
        asked.append(request)
        return answer(pipeline, request, *more)

    monkeypatch.setattr(Pipeline, "answer", noting)
    succeed(*ask, "--regex", "[a-z]+")
    # The request itself is checked before.
    checked, first, counted = asked
    assert vars(checked) | {"pictures": ()} == vars(counted) | {"pictures": ()}
    # A file, which is read within the deadline.
    assert all(isinstance(picture, Path) for picture in counted.pictures)
    assert (first.deadline_ms, first.max_new_tokens, first.regex, first.budget) == (None, 1, None, "retain-32")
    assert counted.deadline_ms == 60_000 and counted.regex == "[a-z]+"


def test_a_picture_of_one_token_is_answered_unpruned(ask: tuple[Any, ...], bundle: Bundles, tmp_path: Path) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "tiny.png")
    small = bundle("qwen", "fp32", ("prune-66.7",))
    words = ("sinkprune-run", small, "--image", tmp_path / "tiny.png", *ask[4:])
    succeed(*words, "--warm-up")
    # By the costs that the first command kept.
    outcome = run(*words)
    assert outcome.code == 0 and "[none] TTFT" in outcome.stdout, (outcome.stdout, outcome.stderr)


def test_a_late_answer_looks_late() -> None:
    for measured, said in ((20.4, "20.4"), (20.6, "21"), (20.0000004, "20.0000004"), (35.2, "35")):
        report = SimpleNamespace(deadline_ms=20.0, budget="none", can_meet=True, met=False, measured_ms=measured)
        assert late_line(report) == f"late: {said} ms where 20 were given, at budget none.\n"  # type: ignore[arg-type]
