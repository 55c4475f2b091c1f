"""`Chain.first_uses` counts what makes a request slow: loading, a first prefill, on openvino each new length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.deadlines.options import first_budgets


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_a_first_prefill_is_one_of_the_process_and_on_openvino_of_its_budget_and_length(
    backend: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    pipeline = Pipeline.load(bundle("gqa-112"), backend=backend)
    pipeline.load_plans("sinkpruner")
    chain, new = pipeline._model.chain, []
    asked = [("What?", "none"), ("What?", "none"), ("What is it?", "none"), ("What?", "retain-64"), ("What?", "none")]
    for question, budget in asked:
        before = chain.first_uses
        pipeline.generate(photo, question, budget=budget, max_new_tokens=1)
        new.append(chain.first_uses > before)
    again = backend == "openvino"
    assert new == [True, False, again, again, False]
    # What a command runs before its deadline counts, whatever the order of budgets in the bundle.
    layouts, manifest = [*pipeline.family.largest().values()], pipeline.bundle.manifest
    plans = dict(reversed(manifest.plans["sinkpruner"].items()))
    turned = replace(pipeline.bundle, manifest=replace(manifest, plans={"sinkpruner": plans}))
    small = ["retain-64", "retain-32"]
    for own in (pipeline.bundle, turned):
        first = partial(first_budgets, own.manifest, pipeline.backend, "sinkpruner")
        assert first("retain-64", layouts) == (small if again else small[-1:])
        assert len(first("none", layouts)) == (5 if again else 1)


def test_openvino_s_first_prefills_correct_no_expected_time(
    bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Pipeline.load(bundle("gqa-112"), backend="openvino").warm_up(photo, "What?", seconds=0.0)
    later = Pipeline.load(bundle("gqa-112"), backend="openvino")
    later.load_plans("sinkpruner")
    for budget, ratios in (("none", 0), ("none", 1), ("retain-64", 1), ("retain-64", 2)):
        later.generate(photo, "What?", budget=budget, deadline_ms=60_000, max_new_tokens=1)
        assert later.costs is not None
        assert len(later._history_of(later.costs).recent.first) == ratios
