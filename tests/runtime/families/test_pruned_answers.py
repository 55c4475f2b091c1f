"""Pruned answers equal the masked full sequence, in every family but LLaVA-1.5 (`steps/test_pruned_chain.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from sinkprune import Clip, Pipeline
from sinkprune.contract.budgets import parse_budget
from sinkprune.contract.errors import PruningError
from support.models.clips import INTERNVL_BUDGETS, VIDEO_BUDGETS, frames
from support.models.small_models import (
    CLIPS_IN_ONE_PIECE,
    INTERNVL_SHAPES,
    NEXT_SHAPES,
    PALIGEMMA_SHAPES,
    QWEN_SHAPES,
)
from support.programs.slow_cases import each_once, every, slow_except
from support.references.masking import assert_equals_masked, embedded, masked_forward
from support.references.pruned_prompts import prompt_rows, sanitized
from support.references.reference import one_stage
from support.references.steps import QUESTION, ask

Models, Pipelines = Callable[[str], Any], Callable[..., Pipeline]

NEW_TOKENS = 6
SHORT: dict[str, Any] = {"prompt": QUESTION, "max_new_tokens": 1}
NEXT_BUDGETS = ("retain-320", "retain-160", "retain-320+no-sanitizer", "retain-320+raster", "retain-160+compact")
# The whole image and two, three and four tiles
NEXT_SIZES = {(300, 150): 3, (100, 400): 4, (230, 200): 5}
OF_INTERNVL: dict[str, Any] = {"budgets": INTERNVL_BUDGETS, "max_frames": 8}
# Two, three and four tiles, and the whole image after them
INTERNVL_SIZES = {(460, 230): 3, (900, 300): 4, (100, 410): 5}
QWEN_BUDGETS = (
    "prune-66.7",
    "prune-77.8",
    "prune-88.9",
    "prune-77.8+raster",
    "prune-77.8+no-sanitizer",
    "prune-77.8+no-diversity",
    "prune-88.9+keep-outliers+visual-keys",
)
# 480, 8, 275 and 4 visual tokens of 28 x 28 pixels
QWEN_SIZES = [(672, 560), (112, 56), (300, 700), (56, 50)]
# Of the others every pair of a checkpoint, a size and a budget. The decoder of Qwen3-VL is deep: every budget at one
# size, and every size at one budget.
QWEN_CASES = [
    (name, size, budget)
    for row, (name, shape) in enumerate(QWEN_SHAPES.items())
    for column, size in enumerate(QWEN_SIZES)
    for layer, budget in enumerate(QWEN_BUDGETS)
    if ((row + column + layer) % 3 == 0 if shape.kind != "qwen3_vl" else size == (300, 700) or budget == "prune-66.7")
]
# 64 and 49 visual tokens. Rows of the prompt see later rows.
PALIGEMMA_CASES = each_once(PALIGEMMA_SHAPES, [(200, 150)], QWEN_BUDGETS)
# Sanitised together and apart, and a stamp of time in front of each pair of frames
STAMPED = [("qwen3-vl", budget) for budget in VIDEO_BUDGETS]
CLIPS = [*each_once(CLIPS_IN_ONE_PIECE, VIDEO_BUDGETS), *slow_except({STAMPED[0], STAMPED[3], STAMPED[4]}, STAMPED)]


def assert_pruned(model: Any, pipe: Pipeline, picture: Any, budget: str, groups: int) -> None:
    """Assert that an answer about `picture` is that of the masked full sequence.

    A stage keeps its share of the tokens of each of the `groups`, which are pruned apart.
    """
    seen = pipe.family.sample_frames(picture) if isinstance(picture, Clip) else picture
    kept, indices, beside = sanitized(pipe, seen, budget)
    sequence = prompt_rows(model, pipe, seen, QUESTION, kept, indices, beside)
    answer, logits = ask(pipe, picture, budget, NEW_TOKENS)
    assert answer.kept.index.tolist() == indices

    manifest = pipe.bundle.manifest
    layers, tokens = manifest.language_model.num_layers, answer.kept.norms.size // groups
    nominal = 10_000 if manifest.any_resolution else None
    stage = one_stage(parse_budget(manifest.family, budget), tokens, layers, nominal)
    stages = {cut: groups * kept for cut, kept in stage.items()}
    later = embedded(model, answer.token_ids[:-1])
    masked = masked_forward(model, sequence, budget, stages, later=later)
    assert_equals_masked(answer, logits, sequence, masked, manifest.tokens.stop)

    left, lengths = len(sequence.visual), []
    for layer in range(layers):
        lengths.append(left)
        left = min(left, stages.get(layer, left))
    assert answer.tokens_per_layer == lengths


@pytest.mark.parametrize(
    ("name", "size", "budget"),
    [
        *each_once(NEXT_SHAPES, NEXT_SIZES, NEXT_BUDGETS),
        *each_once(INTERNVL_SHAPES, INTERNVL_SIZES, INTERNVL_BUDGETS),
        ("internvl", (99, 99), INTERNVL_BUDGETS[0]),
    ],
)
def test_tiles_are_pruned_apart(
    name: str, size: tuple[int, int], budget: str, model: Models, pipeline: Pipelines, photo: Image.Image
) -> None:
    pipe = pipeline(name, **(OF_INTERNVL if name in INTERNVL_SHAPES else {"budgets": NEXT_BUDGETS}))
    groups = {**NEXT_SIZES, **INTERNVL_SIZES, (99, 99): 1}[size]
    assert_pruned(model(name), pipe, photo.resize(size), budget, groups)


@pytest.mark.parametrize(("name", "size", "budget"), [*every(4, QWEN_CASES), *PALIGEMMA_CASES])
def test_images_in_one_group(
    name: str, size: tuple[int, int], budget: str, model: Models, pipeline: Pipelines, photo: Image.Image
) -> None:
    assert_pruned(model(name), pipeline(name, "fp32", QWEN_BUDGETS), photo.resize(size), budget, 1)


@pytest.mark.parametrize(("name", "budget"), [*CLIPS, *each_once(INTERNVL_SHAPES, INTERNVL_BUDGETS[::2])])
def test_clips(name: str, budget: str, model: Models, pipeline: Pipelines, photo: Image.Image) -> None:
    groups = 8 if name in INTERNVL_SHAPES else 1
    pipe = pipeline(name, **(OF_INTERNVL if groups > 1 else {"budgets": VIDEO_BUDGETS, "max_frames": 8}))
    assert_pruned(model(name), pipe, Clip(frames(8, (170, 140), photo), fps=2), budget, groups)


def test_fp16_keeps_the_same_lengths(pipeline: Pipelines, photo: Image.Image) -> None:
    for name, size, budget, lengths in (
        ("next", (230, 200), "retain-320", [75, 35, 35, 35, 35, 35]),
        ("qwen", (672, 560), "prune-88.9", [121, 49, 49, 49, 49, 49]),
    ):
        answer = pipeline(name, "fp16", (budget,)).generate(photo.resize(size), budget=budget, **SHORT)
        assert answer.tokens_per_layer == lengths


def test_an_image_of_one_token_has_nothing_to_prune(pipeline: Pipelines, photo: Image.Image) -> None:
    pipe = pipeline("qwen", "fp32", QWEN_BUDGETS)
    for budget in QWEN_BUDGETS:
        with pytest.raises(PruningError, match="1 visual token and the budget"):
            pipe.generate(photo.resize((28, 28)), budget=budget, **SHORT)
