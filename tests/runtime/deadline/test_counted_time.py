"""What the time of a deadline counts: the whole call, also where it compiles the form of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.deadline.other_load import OtherLoad
from sinkprune.runtime.text.constraint import Grammars
from sinkprune.runtime.text.longest_match import longest_match

Bundles = Callable[..., Path]
QUESTION = "Is there a red circle?"


@pytest.fixture(autouse=True)
def nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are taken to be measured on a machine that does nothing else."""
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)


def test_the_call_counts_and_idle_time_before_the_first_piece_does_not(
    bundle: Bundles, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, constraint = Pipeline.load(bundle("gqa-112")), Grammars.constraint
    pipeline.warm_up(photo, QUESTION, seconds=0)

    def slow(*given: Any) -> Any:
        time.sleep(0.2)
        return constraint(*given)

    monkeypatch.setattr(Grammars, "constraint", slow)
    began = time.perf_counter()
    answer = pipeline.generate(photo, QUESTION, deadline_ms=60_000, max_new_tokens=2)
    whole = (time.perf_counter() - began) * 1e3
    assert answer.deadline is not None
    assert 200 < answer.deadline.measured_ms <= whole
    began = time.perf_counter()
    stream = pipeline.stream(photo, QUESTION, deadline_ms=60_000, max_new_tokens=2)
    time.sleep(1.0)
    deadline = stream.rest().deadline
    assert deadline is not None
    assert 200 < deadline.measured_ms <= (time.perf_counter() - began) * 1e3 - 1000


def test_a_warm_up_with_a_form_reads_the_tokenizer(bundle: Bundles, photo: Image.Image) -> None:
    pipeline = Pipeline.load(bundle("gqa-112"))
    longest_match.cache_clear()
    pipeline.warm_up(photo, QUESTION, seconds=0, regex="[0-9]{1,3}", max_new_tokens=1)
    tokenizer = pipeline._grammars._made
    assert tokenizer is not None
    found = longest_match.cache_info().misses
    pipeline.generate(photo, QUESTION, regex="[0-9]{1,3}", deadline_ms=60_000, max_new_tokens=1)
    assert pipeline._grammars._made is tokenizer
    assert longest_match.cache_info().misses == found
