"""`Chain.first_uses` counts what makes a request slow: loading, a first prefill, on openvino each new length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.deadlines.options import first_budgets


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_first_prefills_correct_no_expected_time(
    backend: str, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Pipeline.load(bundle("gqa-112"), backend=backend).warm_up(photo, "What?", seconds=0.0)
    later = Pipeline.load(bundle("gqa-112"), backend=backend)
    later.load_plans("sinkpruner")
    ratios = list[int]()
    asked = (("What?", "none"), ("What?", "none"), ("What is it?", "none"), ("What?", "retain-64"), ("What?", "none"))
    for question, budget in asked:
        later.generate(photo, question, budget=budget, deadline_ms=60_000, max_new_tokens=1)
        assert later.costs is not None
        ratios.append(len(later._history_of(later.costs).recent.first))
    compiles = backend == "openvino"
    assert ratios == ([0, 1, 1, 1, 2] if compiles else [0, 1, 2, 3, 4])
    # What a command runs before its deadline counts.
    layouts = [*later.family.largest().values()]
    first = first_budgets(later.bundle.manifest, later.backend, "sinkpruner", "retain-64", layouts)
    assert first == (["retain-64", "retain-32"] if compiles else ["retain-32"])
