"""Requests at budgets with options `tower` and `bars`: what is kept, reported, drawn and reused.

A tower with `tower` merges tokens. With `bars`, tokens on the bars of padded pictures never enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.budgets import BARLESS_TOWER, MERGING_TOWER, parse_budget
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BudgetError, UsageError
from sinkprune.contract.manifest import SiglipTower
from sinkprune.contract.schedule import merges_of
from sinkprune.deadlines.policy import schedules_up_to
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.overlay import overlay, token_fates, token_map
from sinkprune.serving.sessions import Session
from support.references.masking import masked_forward
from support.references.pruned_prompts import prompt_rows
from support.references.reference import one_stage, sanitize
from support.references.steps import watched
from support.stand_ins.fake_ort_cuda import CudaRig

Models, Folders = Callable[[str], Any], Callable[[str], Path]
Pipelines, Bundles = Callable[..., Pipeline], Callable[..., Path]
Array = np.ndarray[Any, Any]
PROMPT = "Describe the image, please: which colour is the cup?"
PLAIN, MERGING, BARLESS = "retain-64", "retain-64+tower", "retain-64+bars"
ROBOT = Path(__file__).parents[3] / "demo/pocket-robot"


@pytest.fixture
def pipe(pipeline: Pipelines) -> Pipeline:
    return pipeline("gqa-112", "fp32", (PLAIN, MERGING))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("policy") / "robot"
    budgets = ("prune-80", "prune-80+tower", "prune-80+bars")
    export_bundle(ExportRequest(str(ROBOT), budgets=budgets, max_images=2), folder)
    return Policy.load(folder)


def acted(policy: Policy, cameras: list[Any], budget: str) -> Any:
    noise = np.random.default_rng(0).standard_normal((policy.facts.chunk, policy.facts.action_dim)).astype(np.float32)
    return policy.act(cameras, "pick the red star", [*policy.facts.usual_state], budget=budget, noise=noise)


def acted_as_alone(policy: Policy, cameras: list[Any], budget: str) -> Any:
    """Act: what is kept of each camera is what is kept of it alone."""
    report = acted(policy, cameras, budget)
    for number, kept in enumerate(report.images):
        one = [camera if place == number else None for place, camera in enumerate(cameras)]
        alone = acted(policy, one, budget).images[0]
        np.testing.assert_array_equal(kept.index, alone.index)
        np.testing.assert_array_equal(kept.merged, alone.merged)
        np.testing.assert_allclose(kept.norms, alone.norms, rtol=1e-5)
    return report


def tower_of(chain: Any, tower: str, inputs: dict[str, Array]) -> dict[str, Array]:
    given = {name: chain.backend.tensor(array) for name, array in inputs.items()}
    return {name: chain.backend.numpy(array) for name, array in chain.plan_engine(tower)(given).items()}


def test_an_answer_equals_the_reference_on_merged_tokens(pipe: Pipeline, model: Models, photo: Image.Image) -> None:
    found = tower_of(pipe.chain, MERGING_TOWER, pipe.family.inputs(photo))
    norms, salience, merged = (found[name][0] for name in ("norms", "salience", "merged"))
    # As many of 64 tokens as without the option, of 32 that are left.
    rows, index = sanitize(found["tokens"][0], norms, salience, reserve=7, diverse=7)
    torch_model = model("gqa-112")
    sequence = prompt_rows(torch_model, pipe, photo, PROMPT, rows, [index], None)
    masked = masked_forward(torch_model, sequence, PLAIN, {1: 7})

    steps = watched(pipe, photo, PROMPT, budget=MERGING, max_new_tokens=1)
    assert np.abs(steps.logits[0] - masked.logits[-1]).max() < 1e-3
    (kept,) = steps.answer.images
    places = np.unique(merged)
    token = np.searchsorted(places, merged)
    assert kept.index[0].tolist() == places[index].tolist()
    np.testing.assert_array_equal(kept.norms[0], norms[token])
    np.testing.assert_array_equal(kept.salience[0], salience[token])
    plain = pipe.generate(photo, PROMPT, budget=PLAIN, max_new_tokens=1)
    assert steps.answer.tokens_per_layer == plain.tokens_per_layer
    assert steps.answer.visual_tokens == plain.visual_tokens == 64
    assert kept.layout.tower_flops < 0.82 * plain.images[0].layout.tower_flops


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
    possible = schedules_up_to(pipe.bundle.manifest, "sinkpruner", "none", [pipe.family.layout(photo)])
    assert [planned.budget for planned in possible] == ["none", PLAIN]
    with pytest.raises(BudgetError, match="has a tower of its own"):
        pipe.generate(photo, PROMPT, budget=MERGING, max_new_tokens=1, deadline_ms=1e6)


def test_weights_are_stored_once(bundle: Bundles) -> None:
    plain, merging = (read_bundle(bundle("gqa-112", "fp32", budgets)) for budgets in ((PLAIN,), (PLAIN, MERGING)))
    new = merging.manifest.files.keys() - plain.manifest.files.keys()
    assert {file for file in new if not file.startswith("graphs/sinkpruner/")} == {"graphs/vision+tower.onnx"}
    for file, spec in plain.manifest.files.items():
        assert merging.manifest.files[file] == spec, file


def test_methods_that_read_the_grid_are_left_out(checkpoint: Folders, tmp_path: Path) -> None:
    missed: list[Any] = []
    methods = ("downsample", "vscan", "visionzip", "fastv")
    request = ExportRequest(str(checkpoint("gqa-112")), budgets=(PLAIN, MERGING), methods=methods)
    manifest = export_bundle(request, tmp_path / "bundle", left_out=missed.append)
    left_out = {(one.method, one.budget) for one in missed if "grid" in one.why}
    assert left_out == {("downsample", MERGING), ("vscan", MERGING)}
    pipe = Pipeline.load(tmp_path / "bundle")
    picture = Image.effect_noise((112, 112), 90).convert("RGB")
    for method, plans in manifest.plans.items():
        for budget in plans:
            answer = pipe.generate(picture, PROMPT, method=method, budget=budget, max_new_tokens=2)
            assert len(answer.images[0].index[0]) == answer.tokens_per_layer[0]


def test_each_camera_has_its_own_places(policy: Policy, photo: Image.Image) -> None:
    cameras = [photo, photo.rotate(90, expand=True)]
    report, plain = acted_as_alone(policy, cameras, "prune-80+tower"), acted(policy, cameras, "prune-80")
    assert report.tokens_per_layer == plain.tokens_per_layer
    assert report.flops.tower < 0.7 * plain.flops.tower
    left = 144 - sum(merges_of(policy.bundle.manifest.tower(SiglipTower)).values())
    for kept in report.images:
        assert set(kept.index[0]) <= set(kept.merged[0]) and len(set(kept.merged[0])) == left == 72
    # Positions are those of places, which no host looks up.
    rig = CudaRig(policy.bundle)
    ours = acted(rig.policy(), cameras, "prune-80+tower")
    assert rig.device.reads[0] == (1, *report.actions.shape)
    np.testing.assert_allclose(ours.actions, report.actions, atol=1e-4)
    with pytest.raises((BudgetError, UsageError), match="tower"):
        state = [*policy.facts.usual_state]
        policy.warm_up(cameras, "pick the red star", state, budget="prune-80+tower", seconds=0)


def off_bars(side: int, patch: int, left: int, top: int, width: int, height: int) -> list[int]:
    """Return the patches of a square with a pixel of the picture in it, pixel by pixel."""
    square = np.zeros((side, side), bool)
    square[top : top + height, left : left + width] = True
    blocks = square.reshape(side // patch, patch, side // patch, patch).any(axis=(1, 3))
    return np.flatnonzero(blocks).tolist()


def test_an_answer_is_that_of_the_tokens_off_the_bars(bundle: Bundles, photo: Image.Image) -> None:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", (PLAIN, BARLESS)), fit="pad")
    places = off_bars(600, 75, 0, 100, 600, 400)
    assert len(places) == 48
    given = {**pipe.family.inputs(photo), "places": np.array([places])}
    found = {name: array[0] for name, array in tower_of(pipe.chain, BARLESS_TOWER, given).items()}
    budget, layers = parse_budget("llava", PLAIN), pipe.bundle.manifest.language_model.num_layers
    counts, (left,) = budget.resolve(48), one_stage(budget, 48, layers).values()
    features = [found[name] for name in ("tokens", "norms", "salience")]
    _, index = sanitize(*features, reserve=counts.reserve, diverse=counts.diverse)
    steps = watched(pipe, photo, PROMPT, budget=BARLESS, max_new_tokens=1)
    (kept,) = steps.answer.images
    assert kept.index[0].tolist() == index
    np.testing.assert_array_equal(kept.norms[0], found["norms"])
    assert steps.answer.visual_tokens == 48
    assert steps.answer.tokens_per_layer[0] - steps.answer.tokens_per_layer[-1] == counts.kept - left
    every = pipe.family.layout(photo)
    np.testing.assert_array_equal(kept.layout.boxes, every.boxes[places])
    assert kept.layout.tower_flops < 0.8 * every.tower_flops
    assert "padding" not in {one.name for one in token_map("sinkpruner", kept).classes}


@pytest.mark.parametrize("size", [(96, 96), (96, 72), (54, 96)])
def test_each_camera_keeps_positions_off_its_bars(size: tuple[int, int], policy: Policy, photo: Image.Image) -> None:
    # Cameras of one number of tokens share a call of the tower.
    cameras: list[Any] = [photo.resize((96, 96)), photo.resize(size)]
    report = acted_as_alone(policy, cameras, "prune-80+bars")
    for camera, kept in zip(cameras, report.images, strict=True):
        places = off_bars(96, 8, 0, 0, *camera.size)
        assert kept.layout.places is not None
        assert kept.layout.places.tolist() == [places]
        assert len(kept.norms[0]) == kept.layout.tokens == len(places)
        assert len(kept.index[0]) == parse_budget("pi0", "prune-80").resolve(len(places)).kept
    if size == (96, 96):
        plain = acted(policy, cameras, "prune-80")
        np.testing.assert_array_equal(report.actions, plain.actions)
        assert report.flops == plain.flops


def test_openvino_gives_the_same_tokens(policy: Policy, photo: Image.Image) -> None:
    other = Policy.load(policy.bundle, backend="openvino", compute="fp32")
    cameras = [photo.resize((96, 72)), photo.resize((54, 96))]
    images = [acted(one, cameras, "prune-80+bars").images for one in (other, policy)]
    for found, expected in zip(*images, strict=True):
        np.testing.assert_array_equal(found.index, expected.index)
        np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)


def test_what_a_family_cannot_do_is_refused(checkpoint: Folders, tmp_path: Path) -> None:
    for name, budget, words in (
        ("qwen", "prune-80+tower", "budget 'prune-80.tower': option 'tower' is for CLIP and SigLIP towers"),
        ("siglip-2", "retain-64+tower", "of a few blocks at least"),
        ("gqa-112", "retain-192+tower", "keeps 43 of 64 tokens before the LLM, .* leaves 32. Choose a smaller"),
        ("qwen", "prune-80+bars", "budget 'prune-80.bars': option 'bars' is for families that see one padded square"),
        ("next", "retain-160+bars", "option 'bars' is for families that see one padded square"),
        ("gqa-112", "retain-64+tower+bars", "options 'tower' and 'bars' are for a tower each"),
        ("openvla", "prune-80+action-rows", "option 'action-rows' is for policies whose rows become actions"),
    ):
        with pytest.raises(BudgetError, match=words):
            export_bundle(ExportRequest(str(checkpoint(name)), budgets=(budget,)), tmp_path / "bundle")
