"""Requests at budgets with option `bars`: tokens on the bars of padded pictures never enter the tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.contract.budgets import BARLESS_TOWER, parse_budget
from sinkprune.contract.errors import BudgetError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.overlay import token_map
from support.references.reference import one_stage, sanitize
from support.references.steps import watched

PROMPT = "Describe the image, please: which colour is the cup?"
PLAIN, BARLESS = "retain-64", "retain-64+bars"
ROBOT = Path(__file__).parents[3] / "demo/pocket-robot"


def off_bars(side: int, patch: int, left: int, top: int, width: int, height: int) -> list[int]:
    """Return the patches of a square with a pixel of the picture in it, pixel by pixel."""
    square = np.zeros((side, side), bool)
    square[top : top + height, left : left + width] = True
    blocks = square.reshape(side // patch, patch, side // patch, patch).any(axis=(1, 3))
    return np.flatnonzero(blocks).tolist()


def test_an_answer_is_that_of_the_tokens_off_the_bars(
    bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", (PLAIN, BARLESS)), fit="pad")
    places = off_bars(600, 75, 0, 100, 600, 400)
    assert len(places) == 48
    given = {**pipe.family.inputs(photo), "places": np.array([places])}
    tensors = {name: pipe.backend.tensor(array) for name, array in given.items()}
    found = {name: pipe.backend.numpy(one)[0] for name, one in pipe.chain.plan_engine(BARLESS_TOWER)(tensors).items()}
    budget = parse_budget("llava", PLAIN)
    counts, (left,) = (
        budget.resolve(48),
        one_stage(budget, 48, pipe.bundle.manifest.language_model.num_layers).values(),
    )
    _, index = sanitize(
        found["tokens"], found["norms"], found["salience"], reserve=counts.reserve, diverse=counts.diverse
    )
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
    cropped = pipeline("gqa-112", "fp32", (PLAIN, BARLESS))
    answers = [cropped.generate(photo, PROMPT, budget=name, max_new_tokens=4) for name in (PLAIN, BARLESS)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].images[0].index.tolist() == answers[1].images[0].index.tolist()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("policy") / "robot"
    export_bundle(ExportRequest(str(ROBOT), budgets=("prune-80", "prune-80+bars"), max_images=2), folder)
    return Policy.load(folder)


def acted(policy: Policy, cameras: list[Any], budget: str) -> Any:
    noise = np.random.default_rng(0).standard_normal((policy.facts.chunk, policy.facts.action_dim)).astype(np.float32)
    return policy.act(cameras, "pick the red star", [*policy.facts.usual_state], budget=budget, noise=noise)


@pytest.mark.parametrize("sizes", [(96, 96), (96, 72), (54, 96)])
def test_each_camera_keeps_the_positions_off_its_bars(
    sizes: tuple[int, int], policy: Policy, photo: Image.Image
) -> None:
    cameras: list[Any] = [photo.resize((96, 96)), photo.resize(sizes)]
    report = acted(policy, cameras, "prune-80+bars")
    for number, kept in enumerate(report.images):
        places = off_bars(96, 8, 0, 0, *cameras[number].size)
        assert kept.layout.places is not None
        assert kept.layout.places.tolist() == [places]
        assert len(kept.norms[0]) == kept.layout.tokens == len(places)
        counts = parse_budget("pi0", "prune-80").resolve(len(places))
        assert len(kept.index[0]) == counts.kept
        # Cameras of one number of tokens share a call of the tower.
        alone = acted(
            policy, [one if place == number else None for place, one in enumerate(cameras)], "prune-80+bars"
        )
        np.testing.assert_array_equal(kept.index, alone.images[0].index)
        np.testing.assert_allclose(kept.norms, alone.images[0].norms, rtol=1e-5)
    if sizes == (96, 96):
        plain = acted(policy, cameras, "prune-80")
        np.testing.assert_array_equal(report.actions, plain.actions)
        assert report.flops == plain.flops


def test_openvino_gives_the_same_tokens(policy: Policy, photo: Image.Image) -> None:
    other = Policy.load(policy.bundle, backend="openvino", compute="fp32")
    cameras = [photo.resize((96, 72)), photo.resize((54, 96))]
    for found, expected in zip(
        *(acted(one, cameras, "prune-80+bars").images for one in (other, policy)), strict=True
    ):
        np.testing.assert_array_equal(found.index, expected.index)
        np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "budget", "words"),
    [
        ("qwen", "prune-80+bars", "budget 'prune-80.bars': option 'bars' is for families that see one padded square"),
        ("next", "retain-160+bars", "option 'bars' is for families that see one padded square"),
        ("gqa-112", "retain-64+tower+bars", "options 'tower' and 'bars' are for a tower each"),
    ],
)
def test_what_has_no_bars_is_refused(
    name: str, budget: str, words: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(BudgetError, match=words):
        export_bundle(ExportRequest(str(checkpoint(name)), budgets=(budget,)), tmp_path / "bundle")
