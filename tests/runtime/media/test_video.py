"""Clips in requests and commands: prompts with times between frames, features of the tower, limits and errors.

`tests/runtime/families/` compares the answers with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune import Clip, Pipeline
from sinkprune.contract.errors import BudgetError, PromptError, VideoError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.clips import VIDEO_BUDGETS, frames
from support.models.qwen_towers import features
from support.models.small_models import CLIPS_IN_ONE_PIECE
from support.models.video_files import write_video
from support.programs.commands import assert_refused, run, succeed
from support.references.steps import QUESTION, deepstack_output, patch_grid, tower_output

Models, Folders, Pipelines = Callable[[str], Any], Callable[[str], Path], Callable[..., Pipeline]
# Ragged windows; 8 frames make 4 groups of 5 x 6 tokens of Qwen2.5-VL, and of 4 x 5 of Qwen3-VL
SIZE, TOKENS = (170, 140), {"qwen": 30, "qwen3-vl": 20}


@pytest.fixture
def pipe(pipeline: Pipelines) -> Callable[[str], Pipeline]:
    """A bundle for clips of up to 8 frames."""
    return lambda name: pipeline(name, "fp32", VIDEO_BUDGETS, max_frames=8)


@pytest.fixture
def clip(photo: Image.Image) -> Clip:
    return Clip(frames(8, SIZE, photo), fps=2)


@pytest.mark.parametrize(
    ("name", "block"), [*((name, -2) for name in (*CLIPS_IN_ONE_PIECE, "qwen3-vl")), ("qwen", -1)]
)
@torch.no_grad()
def test_features_of_a_clip_are_those_of_transformers_with_eager_attention_over_all_patches(
    name: str, block: int, model: Models, checkpoint: Folders, clip: Clip, tmp_path: Path
) -> None:
    salience = "last" if block == -1 else None
    request = ExportRequest(str(checkpoint(name)), budgets=("prune-80",), max_frames=8, salience=salience)
    export_bundle(request, tmp_path / "bundle")
    pipe = Pipeline.load(tmp_path / "bundle")
    taken = pipe.family.sample_frames(clip)
    pixels = torch.from_numpy(pipe.family.inputs(taken)["pixel_values"]).flatten(0, 1)
    grid = torch.tensor([patch_grid(pipe, taken)])
    expected = features(model(name).model.visual, pixels, grid, block)
    tokens, norms, found = tower_output(pipe, taken)
    np.testing.assert_allclose(tokens.reshape(expected.tokens.shape), expected.tokens, atol=1e-4)
    np.testing.assert_allclose(norms.ravel(), expected.norms, rtol=1e-4)
    np.testing.assert_allclose(found.ravel(), expected.salience, rtol=1e-4, atol=1e-9)
    beside = deepstack_output(pipe, taken)
    assert (beside is None) == (expected.deepstack is None) == (name != "qwen3-vl")
    if beside is not None:
        beside = np.concatenate([*beside], axis=-1)
        np.testing.assert_allclose(beside.reshape(expected.deepstack.shape), expected.deepstack, atol=1e-4)


@pytest.mark.parametrize(("name", "cut"), [("qwen", 0), ("qwen3-vl", 2)])
def test_a_clip_and_an_image_in_one_prompt(
    name: str, cut: int, pipeline: Pipelines, photo: Image.Image, clip: Clip
) -> None:
    both, tokens = pipeline(name, "fp32", ("prune-80",), max_frames=8, max_images=2), TOKENS[name]
    share = {"qwen": 1880, "qwen3-vl": 1686}[name]
    for pictures, groups in (([clip, photo.resize(SIZE)], [4, 1]), ([photo.resize(SIZE), clip], [1, 4])):
        answer = both.generate(pictures, QUESTION, budget="prune-80", max_new_tokens=2)
        assert [kept.norms.size for kept in answer.images] == [tokens * n for n in groups]
        assert [len(kept.after_stage[cut]) for kept in answer.images] == [
            tokens * n * share // 10_000 for n in groups
        ]


def test_a_clip_longer_than_the_context_is_refused_with_the_budget_that_fits(
    pipe: Callable[[str], Pipeline], photo: Image.Image
) -> None:
    long = Clip(frames(8, (560, 420), photo), fps=2)
    with pytest.raises(PromptError, match=r"1200 visual tokens .* 1024 positions.* Budget 'prune-66\.7' keeps 601"):
        pipe("qwen").generate(long, QUESTION, max_new_tokens=4)


def test_a_bundle_without_video_takes_no_clip(pipeline: Pipelines, clip: Clip) -> None:
    for name in ("qwen", "qwen2-vl", "internvl", "gqa-112"):
        way_out = "Give images" if name == "gqa-112" else "--max-frames"
        with pytest.raises(VideoError, match=f"takes no video.*{way_out}"):
            pipeline(name).generate(clip, QUESTION, max_new_tokens=1)


def test_clips_too_long_for_topk_are_refused_with_the_reason(checkpoint: Folders, tmp_path: Path) -> None:
    # 480 tokens a frame: 20 groups are 9600, of which 40 % are 3840. Sanitised apart, what the stage keeps of the
    # whole clip is the limit: 18.8 % of 42 groups are 3790.
    for budget, most, said in (
        ("prune-80", 40, r"up to 10080 visual tokens.* keeps 4032 .* at most 3840.* 9600 tokens only"),
        ("prune-80+per-frame", 84, r"20640 visual tokens.* keeps 3880"),
    ):
        options = {"precision": "fp16", "max_pixels": 480 * 784}
        fits, longer = (
            ExportRequest(str(checkpoint("qwen")), (budget,), max_frames=count, **options)  # type: ignore[arg-type]
            for count in (most, most + 2)
        )
        export_bundle(fits, tmp_path / budget)
        with pytest.raises(BudgetError, match=said):
            export_bundle(longer, tmp_path / "longer")


@pytest.mark.parametrize("name", TOKENS)
def test_the_commands_take_a_video_file(
    name: str, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    video = write_video(tmp_path / "clip.mp4", frames(20, SIZE, photo))
    root, kept = bundle(name, "fp32", VIDEO_BUDGETS, max_frames=8), tmp_path / "kept.png"
    arguments = ("--video", video, "--prompt", "What happens?")
    options = ("--budget", "prune-80", "--json", "--max-new-tokens", 2, "--overlay", kept)
    outcome = succeed("sinkprune-run", root, *arguments, *options)
    answer = json.loads(outcome.stdout)
    # 2 seconds at 10 frames: 4 shown, 2 groups
    tokens = 2 * TOKENS[name]
    kept_tokens = 1 + tokens * 40 // 100 + tokens * 5 // 100
    assert (answer["visual_tokens"], answer["kept_after_sanitizer"]) == (tokens, kept_tokens)
    with Image.open(kept) as drawn:
        assert drawn.width == 2 * 1100 + 12
    if name == "qwen":
        succeed("sinkprune-profile", root, *arguments, "--budgets", "prune-80", "--repeat", 1, "--new-tokens", 2)
        assert_refused(run("sinkprune-run", root, "--video", tmp_path / "none.mp4", *arguments[2:]), "no such file")
        # Whatever the file is, and also where no package reads videos.
        for path in (video, tmp_path / "none.mp4"):
            assert_refused(run("sinkprune-run", bundle(name), "--video", path, *arguments[2:]), "takes no video")
