"""Requests at budgets with option `tower`: what is kept, reported, drawn and reused, by places of the grid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.budgets import MERGING_TOWER
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BudgetError, UsageError
from sinkprune.contract.manifest import SiglipTower
from sinkprune.contract.schedule import merges_of
from sinkprune.deadlines.policy import schedules_up_to
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.overlay import overlay, token_fates
from sinkprune.runtime.steps.decoding import first_logits
from sinkprune.serving.sessions import Session
from support.references.masking import Sequence, embedded, masked_forward
from support.references.reference import sanitize
from support.references.steps import watched

Array = np.ndarray[Any, Any]
PROMPT = "Describe the image, please: which colour is the cup?"
PLAIN, MERGING = "retain-64", "retain-64+tower"
ROBOT = Path(__file__).parents[3] / "demo/pocket-robot"


@pytest.fixture
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("gqa-112", "fp32", (PLAIN, MERGING))


def tower_of(chain: Any, inputs: dict[str, Array]) -> dict[str, Array]:
    given = {name: chain.backend.tensor(array) for name, array in inputs.items()}
    return {name: chain.backend.numpy(array) for name, array in chain.plan_engine(MERGING_TOWER)(given).items()}


def test_an_answer_equals_the_reference_on_the_merged_tokens(
    pipe: Pipeline, model: Callable[[str], Any], photo: Image.Image
) -> None:
    found = tower_of(pipe.chain, pipe.family.inputs(photo))
    norms, salience, merged = (found[name][0] for name in ("norms", "salience", "merged"))
    # As many of 64 tokens as without the option, of 32 that are left.
    rows, index = sanitize(found["tokens"][0], norms, salience, reserve=7, diverse=7)
    torch_model = model("gqa-112")
    with torch.no_grad():
        image = torch_model.model.multi_modal_projector(torch.from_numpy(rows)[None])[0].numpy()
    question = pipe.prompts.encode(["", PROMPT])
    before, after = (embedded(torch_model, ids) for ids in (question.texts[0], question.texts[-1]))
    start, end = len(before), len(before) + len(image)
    whole = np.concatenate([before, image, after])
    sequence = Sequence(whole, list(range(start, end)), list(range(end, len(whole))))
    masked = masked_forward(torch_model, sequence, PLAIN, {1: 7})

    steps = watched(pipe, photo, PROMPT, budget=MERGING, max_new_tokens=1)
    logits = pipe.backend.numpy(first_logits(pipe.chain, steps.prefill, Stopwatch(pipe.backend)))[0]
    assert np.abs(logits - masked.logits[-1]).max() < 1e-3
    (kept,) = steps.answer.images
    places = np.unique(merged)
    token = np.searchsorted(places, merged)
    assert kept.index[0].tolist() == places[index].tolist()
    np.testing.assert_array_equal(kept.norms[0], norms[token])
    np.testing.assert_array_equal(kept.salience[0], salience[token])
    plain = pipe.generate(photo, PROMPT, budget=PLAIN, max_new_tokens=1)
    assert steps.answer.tokens_per_layer == plain.tokens_per_layer
    assert steps.answer.visual_tokens == plain.visual_tokens == 64
    flops = [one.layout.tower_flops for one in (kept, plain.images[0])]
    assert flops[0] < 0.82 * flops[1]


def test_a_place_has_the_fate_of_its_token(pipe: Pipeline, photo: Image.Image) -> None:
    answer = pipe.generate(photo, PROMPT, budget=MERGING, max_new_tokens=1)
    (kept,) = answer.images
    fates, merged = token_fates(kept), kept.merged
    assert merged is not None and not merged.flags.writeable
    for mask in (fates.sink, fates.kept, fates.survived, *fates.dropped_after.values()):
        assert mask.tolist() == mask[merged[0]].tolist()
    own = merged[0] == np.arange(64)
    assert own.sum() == 32
    assert np.flatnonzero(fates.kept & own).tolist() == sorted(kept.index[0, 1:].tolist())
    assert np.flatnonzero(fates.sink & own).tolist() == [kept.index[0, 0]]
    assert fates.survived.sum() > 4 - (fates.sink_dropped_after is None)
    assert overlay(answer, photo).size[0] > 0


def test_sessions_keep_the_towers_apart(pipe: Pipeline, photo: Image.Image) -> None:
    session = Session(pipe)
    for budget in (PLAIN, MERGING, PLAIN, MERGING, "none"):
        options: dict[str, Any] = {"budget": budget, "max_new_tokens": 4}
        one, other = (asked.generate(photo, PROMPT, **options) for asked in (session, pipe))
        assert one.token_ids == other.token_ids
        for mine, fresh in zip(one.images, other.images, strict=True):
            np.testing.assert_array_equal(mine.index, fresh.index)


def test_deadlines_choose_after_the_tower(pipe: Pipeline, photo: Image.Image) -> None:
    with pytest.raises(BudgetError, match=r"deadlines choose a budget after the vision tower, and 'retain-64.tower'"):
        pipe.warm_up(photo, PROMPT, budget=MERGING, seconds=0)
    pipe.warm_up(photo, PROMPT, budget=PLAIN, seconds=0)
    layouts = [pipe.family.layout(photo)]
    possible = schedules_up_to(pipe.bundle.manifest, "sinkpruner", "none", layouts)
    assert [planned.budget for planned in possible] == ["none", PLAIN]
    with pytest.raises(BudgetError, match="has a tower of its own"):
        pipe.generate(photo, PROMPT, budget=MERGING, max_new_tokens=1, deadline_ms=1e6)


def test_weights_are_stored_once(bundle: Callable[..., Path]) -> None:
    plain, merging = (read_bundle(bundle("gqa-112", "fp32", budgets)) for budgets in ((PLAIN,), (PLAIN, MERGING)))
    new = merging.manifest.files.keys() - plain.manifest.files.keys()
    assert {file for file in new if not file.startswith("graphs/sinkpruner/")} == {"graphs/vision+tower.onnx"}
    for file, spec in plain.manifest.files.items():
        assert merging.manifest.files[file] == spec, file


@pytest.mark.parametrize(
    ("name", "budget", "words"),
    [
        ("qwen", "prune-80+tower", "budget 'prune-80.tower': option 'tower' is for CLIP and SigLIP towers"),
        ("siglip-2", "retain-64+tower", "of a few blocks at least"),
        ("gqa-112", "retain-192+tower", "keeps 43 of 64 tokens before the LLM, .* leaves 32. Choose a smaller"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    name: str, budget: str, words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(BudgetError, match=words):
        export_bundle(ExportRequest(str(checkpoint(name)), budgets=(budget,)), tmp_path / "bundle")


def test_methods_that_read_the_grid_are_left_out(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    missed: list[Any] = []
    request = ExportRequest(
        str(checkpoint("gqa-112")), budgets=(PLAIN, MERGING), methods=("downsample", "vscan", "visionzip", "fastv")
    )
    manifest = export_bundle(request, tmp_path / "bundle", left_out=missed.append)
    assert {(one.method, one.budget) for one in missed if "grid" in one.why} == {
        ("downsample", MERGING),
        ("vscan", MERGING),
    }
    pipe = Pipeline.load(tmp_path / "bundle")
    picture = Image.effect_noise((112, 112), 90).convert("RGB")
    for method, plans in manifest.plans.items():
        for budget in plans:
            answer = pipe.generate(picture, PROMPT, method=method, budget=budget, max_new_tokens=2)
            assert len(answer.images[0].index[0]) == answer.tokens_per_layer[0]


def test_each_camera_has_its_own_places(tmp_path: Path, photo: Image.Image) -> None:
    export_bundle(ExportRequest(str(ROBOT), budgets=("prune-80", "prune-80+tower"), max_images=2), tmp_path / "robot")
    policy = Policy.load(tmp_path / "robot")
    cameras, state = [photo, photo.rotate(90, expand=True)], [*policy.facts.usual_state]
    noise = np.random.default_rng(0).standard_normal((policy.facts.chunk, policy.facts.action_dim)).astype(np.float32)
    report = policy.act(cameras, "pick the red star", state, budget="prune-80+tower", noise=noise)
    plain = policy.act(cameras, "pick the red star", state, budget="prune-80", noise=noise)
    assert report.tokens_per_layer == plain.tokens_per_layer
    assert report.flops.tower < 0.7 * plain.flops.tower
    for number, kept in enumerate(report.images):
        one = [camera if place == number else None for place, camera in enumerate(cameras)]
        alone = policy.act(one, "pick the red star", state, budget="prune-80+tower", noise=noise).images[0]
        np.testing.assert_array_equal(kept.index, alone.index)
        np.testing.assert_array_equal(kept.merged, alone.merged)
        assert kept.merged is not None and set(kept.index[0]) <= set(kept.merged[0])
        assert (
            len(set(kept.merged[0])) == 144 - sum(merges_of(policy.bundle.manifest.tower(SiglipTower)).values()) == 72
        )
    with pytest.raises((BudgetError, UsageError), match="tower"):
        policy.warm_up(cameras, "pick the red star", state, budget="prune-80+tower", seconds=0)
