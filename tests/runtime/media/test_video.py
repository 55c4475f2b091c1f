"""Qwen2.5-VL on a clip: unpruned equal to transformers, pruned equal to masking; too long ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from sinkprune import Clip, Pipeline
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.errors import BudgetError, PromptError, VideoError
from sinkprune.contract.families import parse_budget
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.media.clip import Shown, shown
from support.models.clips import VIDEO_BUDGETS, frames
from support.models.qwen_checkpoints import VIDEO_TOKEN
from support.models.qwen_towers import features
from support.models.small_models import CLIPS_IN_ONE_PIECE, QWEN_SHAPES
from support.models.video_files import write_video
from support.programs.commands import assert_refused, run
from support.programs.slow_cases import each_once
from support.references.masking import Sequence, assert_equals_masked, embedded, masked_forward
from support.references.reference import sanitize
from support.references.steps import QUESTION, ask, patch_grid, tower_output

Array = np.ndarray[Any, Any]

NEW_TOKENS = 6
# Ragged windows; 8 frames make 4 groups of 5 x 6 tokens
SIZE = (170, 140)


@pytest.fixture
def pipe(pipeline: Callable[..., Pipeline]) -> Callable[[str], Pipeline]:
    """A bundle for clips of up to 8 frames."""
    return lambda name: pipeline(name, "fp32", VIDEO_BUDGETS, max_frames=8)


@pytest.fixture
def clip(photo: Image.Image) -> Clip:
    return Clip(frames(8, SIZE, photo), fps=2)


def inputs_of(pipe: Pipeline, clip: Clip) -> tuple[Shown, torch.Tensor]:
    """What the tower is shown of a clip of 8 frames, and transformers' grid of it."""
    taken = shown(clip, pipe.bundle.manifest.processor["video"], 2)
    return taken, torch.tensor([patch_grid(pipe, taken)])


def seconds(name: str, fps: float) -> dict[str, torch.Tensor]:
    """What Qwen2.5-VL is told of time; Qwen2-VL counts frames."""
    counts_frames = name.replace("-", "_").startswith("qwen2_vl")
    return {} if counts_frames else {"second_per_grid_ts": torch.tensor([2 / fps])}


@pytest.mark.parametrize(("name", "fps"), [*((name, 2) for name in CLIPS_IN_ONE_PIECE), ("qwen", 1.3)])
def test_greedy_text_and_logits_equal_transformers(
    name: str,
    fps: float,
    model: Callable[[str], Any],
    checkpoint: Callable[[str], Path],
    pipe: Callable[[str], Pipeline],
    clip: Clip,
) -> None:
    clip = replace(clip, fps=fps)
    taken, grid = inputs_of(pipe(name), clip)
    pixels = pipe(name).family.inputs(taken)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(name))
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    # The published template writes <|video_pad|> where a clip stands, and nothing else is different.
    text = text.replace("<|image_pad|>", "<|video_pad|>" * (int(grid.prod()) // 4))
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        expected = model(name).generate(
            **ids,
            mm_token_type_ids=2 * (ids["input_ids"] == VIDEO_TOKEN).int(),
            pixel_values_videos=torch.from_numpy(pixels["pixel_values"]).flatten(0, 1),
            video_grid_thw=grid,
            **seconds(name, taken.size.fps),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    answer, logits = ask(pipe(name), clip, "none", NEW_TOKENS)
    length = ids["input_ids"].shape[1]
    assert answer.visual_tokens == 4 * 30
    assert answer.visual_tokens + answer.prompt_tokens == length
    assert np.abs(logits - torch.stack(expected.logits)[:, 0].numpy()).max() < 1e-3
    assert answer.token_ids == expected.sequences[0, length:].tolist()


@pytest.mark.parametrize(("name", "block"), [*((name, -2) for name in CLIPS_IN_ONE_PIECE), ("qwen", -1)])
@torch.no_grad()
def test_salience_is_eager_attention_over_all_patches_of_the_clip(
    name: str,
    block: int,
    model: Callable[[str], Any],
    checkpoint: Callable[[str], Path],
    clip: Clip,
    tmp_path: Path,
) -> None:
    salience = "last" if block == -1 else None
    request = ExportRequest(str(checkpoint(name)), budgets=("prune-80",), max_frames=8, salience=salience)
    export_bundle(request, tmp_path / "bundle")
    pipe = Pipeline.load(tmp_path / "bundle")
    taken, grid = inputs_of(pipe, clip)
    frames_of_patches = torch.from_numpy(pipe.family.inputs(taken)["pixel_values"]).flatten(0, 1)
    expected = features(model(name).model.visual, frames_of_patches, grid, block).salience.view(4, 30)
    _, _, found = tower_output(pipe, taken)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-9)


def expected_sequence(model: Any, pipe: Pipeline, clip: Clip, budget: str) -> tuple[Sequence, list[list[int]]]:
    """[before ; Z ; after] by the reference's sanitizer, at transformers' positions; and Z's sources, by group."""
    taken, grid = inputs_of(pipe, clip)
    features = [*tower_output(pipe, taken)]
    options = parse_budget("qwen2.5-vl", budget)
    if options.frames == "together":
        features = [x.reshape(1, -1, *x.shape[2:]) for x in features]
    kept, indices = [], []
    for tokens, norms, salience in zip(*features, strict=True):
        n, index = len(norms), list(range(len(norms)))
        if options.sanitizer:
            reserve, diverse = options.reserve.of(n), options.diverse.of(n)
            raster = options.order == "raster"
            tokens, index = sanitize(tokens, norms, salience, reserve=reserve, diverse=diverse, raster=raster)
        kept.append(tokens)
        indices.append(index)
    question, n = pipe.prompts.encode(["", QUESTION]), features[1].size
    before, after = (embedded(model, ids) for ids in (question.texts[0], question.texts[-1]))
    ids = torch.tensor([[*question.texts[0], *[VIDEO_TOKEN] * n, *question.texts[-1]]])
    positions, _ = model.model.get_rope_index(
        ids,
        2 * (ids == VIDEO_TOKEN).int(),
        video_grid_thw=grid,
        **seconds(model.config.model_type, taken.size.fps),
    )
    start, each = len(before), n // len(indices)
    sources = [start + group * each + i for group, index in enumerate(indices) for i in index]
    rows = [*range(start), *sources, *range(start + n, ids.shape[1])]
    hidden = np.concatenate([before, *kept, after])
    end = start + len(sources)
    places = positions[:, 0, rows].numpy()
    visual, text = list(range(start, end)), list(range(end, len(rows)))
    return Sequence(hidden, visual, text, places, "qwen2.5-vl"), indices


@pytest.mark.parametrize(("name", "budget"), each_once(CLIPS_IN_ONE_PIECE, VIDEO_BUDGETS))
def test_pruned_equals_the_masked_full_sequence(
    name: str, budget: str, model: Callable[[str], Any], pipe: Callable[[str], Pipeline], clip: Clip
) -> None:
    sequence, indices = expected_sequence(model(name), pipe(name), clip, budget)
    answer, logits = ask(pipe(name), clip, budget, NEW_TOKENS)
    expected_groups = 4 if "per-frame" in budget else 1
    assert len(answer.kept.norms) == (4 if budget.endswith("no-sanitizer") else expected_groups)
    assert np.concatenate(answer.kept.index).size == len(sequence.visual)
    if "no-sanitizer" not in budget:
        assert answer.kept.index.tolist() == indices
    shares = parse_budget("qwen2.5-vl", budget).stages
    cuts = prune_layers(QWEN_SHAPES[name].num_layers)
    stages = {cut: share.of(120) for cut, share in zip(cuts, shares, strict=True)}
    later = embedded(model(name), answer.token_ids[:-1])
    masked = masked_forward(model(name), sequence, budget, stages, later=later)
    assert_equals_masked(answer, logits, sequence, masked)


def test_an_image_is_pruned_as_by_a_bundle_without_video(
    pipe: Callable[[str], Pipeline], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    plain = pipeline("qwen", "fp32", ("prune-80", "prune-66.7"))
    for budget in ("none", "prune-80", "prune-66.7"):
        answers = [
            x.generate(photo.resize(SIZE), QUESTION, budget=budget, max_new_tokens=4) for x in (pipe("qwen"), plain)
        ]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[0].kept.index.tolist() == answers[1].kept.index.tolist()


def test_a_clip_and_an_image_in_one_prompt(pipeline: Callable[..., Pipeline], photo: Image.Image, clip: Clip) -> None:
    both = pipeline("qwen", "fp32", ("prune-80",), max_frames=8, max_images=2)
    answer = both.generate([clip, photo.resize(SIZE)], QUESTION, budget="prune-80", max_new_tokens=2)
    assert [kept.norms.size for kept in answer.images] == [120, 30]
    assert [len(kept.after_stage[0]) for kept in answer.images] == [36, 9]


def test_a_clip_longer_than_the_context_is_refused_with_the_budget_that_fits(
    pipe: Callable[[str], Pipeline], photo: Image.Image
) -> None:
    long = Clip(frames(8, (560, 420), photo), fps=2)
    with pytest.raises(PromptError, match=r"1200 visual tokens .* 1024 positions.* Budget 'prune-66\.7' keeps 601"):
        pipe("qwen").generate(long, QUESTION, max_new_tokens=4)


def test_a_bundle_without_video_takes_no_clip(pipeline: Callable[..., Pipeline], clip: Clip) -> None:
    for name, way_out in (("qwen", "--max-frames"), ("qwen2-vl", "--max-frames"), ("gqa-112", "Give images")):
        with pytest.raises(VideoError, match=f"takes no video.*{way_out}"):
            pipeline(name).generate(clip, QUESTION, max_new_tokens=1)
    with pytest.raises(VideoError, match="no frames"):
        pipeline("qwen", "fp32", VIDEO_BUDGETS, max_frames=8).generate(Clip([], 2), QUESTION, max_new_tokens=1)


def test_clips_too_long_for_topk_are_refused_with_the_reason(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def export(budget: str, frames: int) -> None:
        request = ExportRequest(str(checkpoint("qwen")), budgets=(budget,), max_frames=frames, precision="fp16")
        export_bundle(request, tmp_path / f"{budget}-{frames}")

    # 480 tokens a frame: 20 groups are 9600, of which 40 % are 3840.
    export("prune-80", 40)
    with pytest.raises(
        BudgetError, match=r"up to 10080 visual tokens.* keeps 4032 .* at most 3840.* 9600 tokens only"
    ):
        export("prune-80", 42)
    # Sanitised apart, what a stage keeps of the whole clip is the limit: 30 % of 12800.
    export("prune-80+per-frame", 52)
    with pytest.raises(BudgetError, match=r"12960 visual tokens.* keeps 3888"):
        export("prune-80+per-frame", 54)


def test_options_and_limits_that_are_for_video_only(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for name, budget in (("qwen", "prune-80+per-frame"), ("gqa-112", "retain-64+per-frame")):
        with pytest.raises(BudgetError, match="'per-frame' is for clips"):
            export_bundle(ExportRequest(str(checkpoint(name)), budgets=(budget,)), tmp_path / "bundle")
    refused = run("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "bundle", "--max-frames", 8)
    assert_refused(refused, "family 'llava' takes no video", "--max-frames")
    refused = run("sinkprune-export", checkpoint("qwen"), "-o", tmp_path / "bundle", "--max-frames", -1)
    assert_refused(refused, "--max-frames is -1")
    refused = run("sinkprune-export", checkpoint("qwen"), "-o", tmp_path / "bundle", "--max-frames", 1)
    assert_refused(refused, "--max-frames is 1, expected at least 2")


def test_the_commands_take_a_video_file(bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path) -> None:
    video, root = (
        write_video(tmp_path / "clip.mp4", frames(20, SIZE, photo)),
        bundle("qwen", "fp32", VIDEO_BUDGETS, max_frames=8),
    )
    asked, kept = ("--video", video, "--prompt", "What happens?"), tmp_path / "kept.png"
    options = ("--budget", "prune-80", "--json", "--max-new-tokens", 2, "--overlay", kept)
    outcome = run("sinkprune-run", root, *asked, *options)
    assert outcome.code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    # 2 seconds at 10 frames: 4 shown, 2 groups of 30 tokens
    assert (answer["visual_tokens"], answer["kept_after_sanitizer"]) == (60, 1 + 24 + 3)
    with Image.open(kept) as drawn:
        assert drawn.width == 2 * 1100 + 12
    outcome = run("sinkprune-profile", root, *asked, "--budgets", "prune-80", "--repeat", 1, "--new-tokens", 2)
    assert outcome.code == 0, outcome.stderr
    assert_refused(run("sinkprune-run", root, "--video", tmp_path / "none.mp4", *asked[2:]), "no such file")
    assert_refused(run("sinkprune-run", bundle("qwen"), *asked), "takes no video")
    # Whatever the file is, and also where no package reads videos.
    assert_refused(
        run("sinkprune-run", bundle("qwen"), "--video", tmp_path / "none.mp4", *asked[2:]), "takes no video"
    )
