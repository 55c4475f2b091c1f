"""The attention that budgets drop: measured beside what stages keep, summed beside plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.calibration.scheduling.attention import (
    Measurements,
    PictureAttention,
    dropped_attention,
    measure_attention,
    plan_space,
)
from sinkprune.calibration.scheduling.propose import sanitizers, sizes
from sinkprune.calibration.scheduling.search import TRIAL, Trials
from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.bundle import read_bundle

Bundles = Callable[..., Path]
QUESTION = "What is in the picture?"


@pytest.mark.parametrize(("name", "stage"), [("gqa-112", Share(9, 64)), ("qwen", Share(200, 1000))])
def test_a_stage_keeps_what_the_text_attends_to_most(
    name: str, stage: Share, bundle: Bundles, tmp_path: Path, photo: Image.Image
) -> None:
    trials = Trials(read_bundle(bundle(name)), tmp_path)
    pipeline, cuts = Pipeline.load(trials.bundle), trials.bundle.manifest.cut_after
    every = Budget(Share(1, 1), Share(0, 1), (stage,), sanitizer=False)
    some = Budget(Share(1, 5), Share(1, 5), ())
    for number, cut in enumerate(cuts):
        trials.add(f"after {number}", every, (cut,))
    trials.add("some", some, ())
    found = measure_attention(pipeline, photo, QUESTION, ["some"])
    for number, cut in enumerate(cuts):
        answer = pipeline.generate(photo, QUESTION, method=TRIAL, budget=f"after {number}", max_new_tokens=1)
        kept = answer.kept.after_stage[cut]
        best = np.sort(np.argsort(-found.received[number], kind="stable")[: stage.of(found.received.shape[1])])
        assert kept.tolist() == best.tolist()
    answer = pipeline.generate(photo, QUESTION, method=TRIAL, budget="some", max_new_tokens=1)
    assert found.kept[0].tolist() == answer.kept.index.ravel().tolist()


def test_what_is_lost_beside_plain_loops() -> None:
    random = np.random.default_rng(3)
    attended = [
        PictureAttention(random.uniform(0, 1, (2, tokens)), [random.permutation(tokens)[:kept] for kept in (5, 12)])
        for tokens in (20, 30)
    ]
    stages, selects, seen = [Share(1, 10), Share(1, 3)], [0, 1], [0, 1, 1]
    before, after = dropped_attention(attended, stages, selects, seen)
    assert before.shape == (2, 3) and after.shape == (2, 2, 3, 2)
    for sanitizer, segment in np.ndindex(2, 3):
        gone = []
        for one in attended:
            own = one.received[seen[segment]]
            gone.append(1 - sum(own[token] for token in one.kept[sanitizer]) / sum(own))
        assert before[sanitizer, segment] == pytest.approx(np.mean(gone))
        for select, size in np.ndindex(2, 2):
            gone = []
            for one in attended:
                own, ranks = one.received[seen[segment]], one.received[selects[select]]
                best = sorted(one.kept[sanitizer], key=lambda token: -ranks[token])
                count = stages[size].numerator * len(own) // stages[size].denominator
                gone.append(1 - sum(own[token] for token in best[:count]) / sum(own))
            assert after[sanitizer, select, segment, size] == pytest.approx(np.mean(gone))


def test_cuts_that_were_not_measured_go_by_those_that_were() -> None:
    attended = [PictureAttention(np.array([[4.0, 3, 2, 1], [1.0, 2, 3, 4]]), [np.arange(4)])]
    looked = Measurements(attended, (2, 6), (4,), [Share(1, 4), Share(2, 4)], 4)
    own, more = plan_space(looked, (2, 6), 10), plan_space(looked, (1, 2, 4, 6, 8), 10)
    assert own.layers == (3, 4, 3) and more.layers == (2, 1, 2, 2, 2, 1)
    assert (own.sizes.tolist(), own.kept.tolist()) == ([1, 2], [4])
    # Layer 1 was not measured and takes the values of 2, layer 4 those of 2, layer 8 those of 6.
    for cut, same in ((0, 0), (1, 0), (2, 0), (3, 1), (4, 1)):
        for segment, alike in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)):
            assert more.lost_after[0, cut, segment].tolist() == own.lost_after[0, same, alike].tolist()


@pytest.mark.parametrize("name", ["gqa-112", "qwen", "next"])
def test_the_grid_holds_what_the_familys_budgets_keep(name: str, bundle: Bundles) -> None:
    manifest = read_bundle(bundle(name)).manifest
    kept = {(each.reserve, each.diverse) for each in sanitizers(manifest)}
    whole = sizes(manifest)[0].denominator
    counts = [size.numerator for size in sizes(manifest)]
    assert counts == sorted(set(counts)) and counts[0] >= 1
    for budget in manifest.budgets.values():
        assert (budget.reserve, budget.diverse) in kept
        assert {stage.of(whole) for stage in budget.stages} <= {*counts}
    for each in sanitizers(manifest):
        found = each.resolve(manifest.most_visual_tokens)
        assert found.reserve >= 1 and found.diverse >= 1 and found.kept <= manifest.most_visual_tokens
