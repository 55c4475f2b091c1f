"""Methods whose counts vary by picture: answers equal the masked full sequence, and counts are those of the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import BudgetError, Clip, Pipeline, Session, UsageError, overlay
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.commands.deadline_costs import run_once
from sinkprune.runtime.steps.answer import Answer
from support.models.clips import frames
from support.programs.commands import assert_refused, run
from support.references.masking import assert_equals_masked, embedded, masked_forward
from support.references.occamtoken import evidence_of_tokens, kept_by_evidence, passing
from support.references.picture_prompts import PIECES
from support.references.pruned_prompts import prompt_rows
from support.references.reference import largest, text_attention
from support.references.steps import QUESTION, ask, deepstack_output, tower_output, watched

METHOD = "occamtoken"
NEW_TOKENS = 4
BUDGETS = {
    "gqa-112": ("retain-64", "retain-32+compact"),
    "next": ("retain-320",),
    "qwen-tied": ("prune-66.7",),
    "qwen2-vl": ("prune-66.7",),
    "qwen3-vl": ("prune-66.7", "prune-88.9+visual-keys"),
}
NOTHING = 3e38
"""A threshold that no token passes."""


@pytest.fixture(scope="module")
def bundles(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    """A loaded bundle of both kinds of methods for up to two images, of the checkpoint of a name."""
    made: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in made:
            folder = tmp_path_factory.mktemp("varying") / name
            options = {"max_frames": 4} if name.startswith("qwen") else {"max_images": 2}
            request = ExportRequest(str(checkpoint(name)), BUDGETS[name], ("sinkpruner", METHOD), **options)
            export_bundle(request, folder)
            made[name] = Pipeline.load(folder)
        return made[name]

    return get


def with_thresholds(pipe: Pipeline, budget: str, thresholds: tuple[float, ...] | None) -> Pipeline:
    """The pipeline, with these thresholds at the budget."""
    plans = pipe.bundle.manifest.plans[METHOD]
    assert plans[budget].evidence is not None
    plans[budget] = replace(plans[budget], evidence=replace(plans[budget].evidence, thresholds=thresholds))
    return pipe


def kept_of(pipe: Pipeline, picture: Any, threshold: float) -> tuple[Any, list[int], Any]:
    """What the reference's first test keeps of a picture, all its groups as one."""
    tokens, norms, salience = (x.reshape(-1, *x.shape[2:]) for x in tower_output(pipe, picture))
    beside = deepstack_output(pipe, picture)
    if beside is not None:
        beside = np.concatenate([*beside.reshape(len(beside), -1, beside.shape[-1])], axis=-1)
        tokens = np.concatenate([tokens, beside], axis=-1)
    rows, index = kept_by_evidence(tokens, norms, salience, threshold)
    return rows, index, beside


def assert_masked(model: Any, pipe: Pipeline, picture: Any, budget: str, thresholds: tuple[float, float]) -> Answer:
    """Assert that an answer is that of the masked full sequence, for the reference's counts; returns the answer."""
    with_thresholds(pipe, budget, thresholds)
    seen = pipe.family.sample_frames(picture) if isinstance(picture, Clip) else picture
    rows, index, beside = kept_of(pipe, seen, thresholds[0])
    width = rows.shape[1] if beside is None else rows.shape[1] - beside.shape[1]
    sets = [rows[:, place : place + width] for place in range(width, rows.shape[1], width)]
    own = np.stack(sets) if sets else None
    sequence = prompt_rows(model, pipe, seen, QUESTION, rows[:, :width], [index], own)

    answer, logits = ask(pipe, picture, budget, NEW_TOKENS, QUESTION, METHOD)
    assert answer.kept.index.tolist() == [index]
    (cut,) = pipe.bundle.manifest.plans[METHOD][budget].cuts
    later = embedded(model, answer.token_ids[:-1])
    masked = masked_forward(model, sequence, budget, {cut: passing(thresholds[1])}, later)
    if "compact" in budget:
        assert np.abs(logits[0] - masked.logits[len(sequence.rows) - 1]).max() < 1e-3
    else:
        assert_equals_masked(answer, logits, sequence, masked, pipe.bundle.manifest.tokens.stop)
    left = len(answer.kept.after_stage[cut])
    layers = len(answer.tokens_per_layer)
    assert answer.tokens_per_layer == [len(index)] * (cut + 1) + [left] * (layers - cut - 1)
    assert answer.kept.schedule.rows == len(index) and answer.kept.schedule.after == {cut: left}
    return answer


def passed_by_a_third(pipe: Pipeline, picture: Any) -> float:
    """A threshold between the evidence of two tokens of a picture, which a third of the others pass."""
    _, norms, salience = (x.ravel() if x.ndim == 2 else x for x in tower_output(pipe, picture))
    values = sorted(value for value in evidence_of_tokens(norms, salience) if np.isfinite(value))
    at = 2 * len(values) // 3
    gap = max(range(at - 3, at + 3), key=lambda i: values[i + 1] - values[i])
    return float(values[gap] + values[gap + 1]) / 2


@pytest.mark.parametrize(("name", "budget"), [(name, one) for name, own in BUDGETS.items() for one in own])
def test_answers_equal_the_masked_full_sequence(
    name: str, budget: str, bundles: Callable[[str], Pipeline], model: Callable[[str], Any], photo: Image.Image
) -> None:
    pipe, image, counts = bundles(name), photo.resize((300, 350)), []
    for threshold, of_stage in ((0.4, 0.3), (passed_by_a_third(pipe, image), 0.97), (NOTHING, NOTHING)):
        answer = assert_masked(model(name), pipe, image, budget, (threshold, of_stage))
        counts.append((answer.tokens_per_layer[0], answer.tokens_per_layer[-1]))
    all_but_a_few, some, one = counts
    assert all_but_a_few[0] > some[0] > 9 and all_but_a_few[1] > 1
    # The register and a token; then one row.
    assert one == (2, 1)


@pytest.mark.parametrize("name", [name for name in BUDGETS if name.startswith("qwen")])
def test_the_frames_of_a_clip_are_one_group(
    name: str, bundles: Callable[[str], Pipeline], model: Callable[[str], Any], photo: Image.Image
) -> None:
    clip = Clip(frames(4, (170, 140), photo), fps=2)
    answer = assert_masked(model(name), bundles(name), clip, BUDGETS[name][0], (1.05, 0.97))
    assert 2 < answer.kept.index.size < answer.visual_tokens


@pytest.mark.parametrize("name", ["gqa-112", "next"])
def test_each_image_has_its_own_counts(name: str, bundles: Callable[[str], Pipeline], photo: Image.Image) -> None:
    pipe, thresholds = with_thresholds(bundles(name), BUDGETS[name][0], (1.0, 0.97)), (1.0, 0.97)
    images = [photo, photo.rotate(90).crop((0, 0, 200, 150))]
    pieces = ["", "", QUESTION]
    steps = watched(pipe, images, pieces, method=METHOD, budget=BUDGETS[name][0], max_new_tokens=1)
    answer, rows = steps.answer, steps.rows
    (cut,) = pipe.bundle.manifest.plans[METHOD][BUDGETS[name][0]].cuts
    # The attention to each picture's rows, of which the first is its register.
    query, key = (pipe.backend.numpy(steps.prefill.scored[part])[0] for part in ("query", "key"))
    scores = text_attention(query, key, rows.visual.tolist(), rows.text.tolist())
    left = []
    for number, (image, kept) in enumerate(zip(images, answer.images, strict=True)):
        own = scores[rows.picture == number]
        passed = passing(thresholds[1])(own)
        assert kept.after_stage[cut].tolist() == sorted(largest(own, passed))
        _, index, _ = kept_of(pipe, image, thresholds[0])
        assert kept.index.tolist() == [index]
        assert kept.schedule.rows == len(index)
        left.append(len(kept.after_stage[cut]))
        assert kept.schedule.after == {cut: left[-1]}
    counts = [kept.index.size for kept in answer.images]
    assert counts[0] != counts[1] and 1 < left[0] != left[1] > 1
    assert answer.tokens_per_layer[0] == sum(counts) and answer.tokens_per_layer[-1] == sum(left)


def test_the_order_of_images_does_not_matter_before_the_llm(
    bundles: Callable[[str], Pipeline], photo: Image.Image
) -> None:
    pipe = with_thresholds(bundles("gqa-112"), "retain-64", (1.0, 0.97))
    images = [photo, photo.rotate(90)]
    one, other = (ask(pipe, order, "retain-64", 1, PIECES, METHOD)[0] for order in (images, images[::-1]))
    assert [kept.index.tolist() for kept in one.images] == [kept.index.tolist() for kept in other.images[::-1]]


def test_a_session_answers_like_the_pipeline(bundles: Callable[[str], Pipeline], photo: Image.Image) -> None:
    """Budgets share the sanitizer's file, but not its threshold, so they share no rows."""
    pipe = bundles("gqa-112")
    with_thresholds(pipe, "retain-64", (0.8, 0.9))
    with_thresholds(pipe, "retain-32+compact", (1.4, 0.9))
    session = Session(pipe)
    for budget, question in (
        ("retain-64", "Which colour is the cup?"),
        ("retain-32+compact", "Which colour is the cup?"),
        ("retain-64", "Which colour is the table?"),
    ):
        options: dict[str, Any] = {"method": METHOD, "budget": budget, "max_new_tokens": 4, "min_new_tokens": 4}
        alone, shared = (each.generate(photo, question, **options) for each in (pipe, session))
        assert (shared.token_ids, shared.tokens_per_layer) == (alone.token_ids, alone.tokens_per_layer)
    assert shared.reused_rows > shared.kept.index.size


def test_an_image_of_one_token_is_answered(bundles: Callable[[str], Pipeline], photo: Image.Image) -> None:
    pipe = with_thresholds(bundles("qwen-tied"), "prune-66.7", (1.0, 1.0))
    answer = pipe.generate(photo.resize((28, 28)), QUESTION, method=METHOD, budget="prune-66.7", max_new_tokens=1)
    assert set(answer.tokens_per_layer) == {1}


def test_the_kept_tokens_are_drawn(bundles: Callable[[str], Pipeline], photo: Image.Image) -> None:
    pipe = with_thresholds(bundles("gqa-112"), "retain-64", (1.0, 0.9))
    answer = pipe.generate(photo, QUESTION, method=METHOD, budget="retain-64", max_new_tokens=1)
    assert overlay(answer, photo).width > 0


@pytest.mark.parametrize("backend", ["openvino", "ort-cpu+openvino"])
def test_backends_keep_the_same_tokens(backend: str, bundles: Callable[[str], Pipeline], photo: Image.Image) -> None:
    pipe = with_thresholds(bundles("gqa-112"), "retain-64", (1.0, 0.9))
    other = Pipeline.load(pipe.bundle, backend=backend, compute="fp32")
    options: dict[str, Any] = {"method": METHOD, "budget": "retain-64", "max_new_tokens": 3, "min_new_tokens": 3}
    one, two = (each.generate(photo, QUESTION, **options) for each in (pipe, other))
    assert (one.token_ids, one.tokens_per_layer) == (two.token_ids, two.tokens_per_layer)
    assert one.kept.index.tolist() == two.kept.index.tolist()


def test_what_was_not_calibrated_is_refused(bundles: Callable[[str], Pipeline], photo: Image.Image) -> None:
    pipe = with_thresholds(bundles("gqa-112"), "retain-64", None)
    with pytest.raises(
        BudgetError, match=r"what meets the mean of budget 'retain-64' is not known.*calibrate evidence"
    ):
        pipe.generate(photo, QUESTION, method=METHOD, budget="retain-64")
    # The unpruned model needs no threshold.
    assert pipe.generate(photo, QUESTION, method=METHOD, budget="none", max_new_tokens=1).visual_tokens == 64


def test_what_needs_counts_before_the_request_is_refused(
    bundles: Callable[[str], Pipeline], photo: Image.Image, photo_file: Path
) -> None:
    pipe = with_thresholds(bundles("gqa-112"), "retain-64", (1.0, 1.0))
    uncounted = with_thresholds(bundles("gqa-112"), "retain-64", None)
    options: dict[str, Any] = {"method": METHOD, "budget": "retain-64"}
    calls: Sequence[Callable[[], Any]] = (
        lambda: pipe.generate(photo, QUESTION, deadline_ms=500.0, **options),
        lambda: pipe.generate(photo, QUESTION, deadline_ms=500.0, method=METHOD, budget="none"),
        lambda: pipe.warm_up(photo, QUESTION, seconds=0, **options),
        # Thresholds would not help a deadline.
        lambda: run_once(uncounted, uncounted.new_request(photo, QUESTION, deadline_ms=500.0, **options), []),
    )
    for call in calls:
        with pytest.raises(UsageError, match="keeps another number of tokens of each picture"):
            call()
    ask_it = (pipe.bundle.path, "--image", photo_file, "--prompt", QUESTION, "--method", METHOD)
    assert_refused(run("sinkprune-run", *ask_it, "--budget", "retain-64"), "sinkprune-calibrate evidence")


def test_the_register_of_the_reference_is_the_outliers(
    bundles: Callable[[str], Pipeline], photo: Image.Image
) -> None:
    """A picture's counts grow as its outliers lose salience: evidence is relative."""
    _, norms, salience = (x[0] for x in tower_output(bundles("gqa-112"), photo))
    outlier = int(np.argmax(norms))
    counts = []
    for factor in (4.0, 1.0, 0.25):
        changed = salience.copy()
        changed[outlier] *= factor
        counts.append(sum(value > 1 for value in evidence_of_tokens(norms, changed)))
    assert counts == sorted(counts) and counts[0] < counts[-1]
