"""A pruned Qwen2.5-VL answer equals the full sequence with the dropped tokens masked, positions and all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.errors import PruningError
from sinkprune.contract.families import parse_budget
from support.models.small_models import QWEN_SHAPES
from support.programs.slow_cases import every
from support.references.masking import Sequence, assert_equals_masked, embedded, masked_forward
from support.references.qwen_sequences import qwen_sequence
from support.references.reference import beside_kept, sanitize
from support.references.steps import ask, deepstack_output, tower_output

PROMPT = "Which colour is the cup?"
NEW_TOKENS = 6
BUDGETS = (
    "prune-66.7",
    "prune-77.8",
    "prune-88.9",
    "prune-77.8+raster",
    "prune-77.8+no-sanitizer",
    "prune-77.8+no-diversity",
    "prune-88.9+keep-outliers+visual-keys",
)
# 480, 8, 275 and 4 visual tokens of 28 x 28 pixels
SIZES = [(672, 560), (112, 56), (300, 700), (56, 50)]
# Of the others every pair of a checkpoint, a size and a budget. The decoder of Qwen3-VL is deep: every budget at one
# size, and every size at one budget.
CASES = [
    (name, size, budget)
    for row, (name, shape) in enumerate(QWEN_SHAPES.items())
    for column, size in enumerate(SIZES)
    for layer, budget in enumerate(BUDGETS)
    if ((row + column + layer) % 3 == 0 if shape.kind != "qwen3_vl" else size == (300, 700) or budget == "prune-66.7")
]


def expected_sequence(model: Any, pipe: Pipeline, image: Image.Image, budget: str) -> tuple[Sequence, list[int]]:
    """[before ; Z ; after] by the reference's sanitizer, at transformers' positions; and Z's source indices."""
    tokens, norms, salience = (array[0] for array in tower_output(pipe, image))
    options, n = parse_budget("qwen2.5-vl", budget), len(norms)
    index, beside = list(range(n)), deepstack_output(pipe, image)
    if options.sanitizer:
        tokens, index = sanitize(
            tokens,
            norms,
            salience,
            reserve=options.reserve.of(n),
            diverse=options.diverse.of(n),
            remove_outliers=options.remove_outliers,
            raster=options.order == "raster",
        )
    if beside is not None:
        sink = options.sanitizer and options.remove_outliers
        beside = beside_kept(beside[:, 0], norms, index, sink=sink)
    return qwen_sequence(model, pipe, image, PROMPT, tokens, index, beside), index


def stages_of(name: str, budget: str, tokens: int) -> dict[int, int]:
    """Visual rows each pruning layer leaves at most."""
    shares = parse_budget("qwen2.5-vl", budget).stages
    cuts = prune_layers(QWEN_SHAPES[name].num_layers)
    return {cut: max(1, tokens * share.numerator // 1000) for cut, share in zip(cuts, shares, strict=True)}


@pytest.mark.parametrize(("name", "size", "budget"), every(4, CASES))
def test_prefill_and_decode_equal_the_masked_full_sequence(
    name: str,
    size: tuple[int, int],
    budget: str,
    model: Callable[[str], Any],
    bundle: Callable[..., Path],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
) -> None:
    torch_model, pipe, image = model(name), pipeline(name, "fp32", BUDGETS), photo.resize(size)
    sequence, index = expected_sequence(torch_model, pipe, image, budget)
    answer, logits = ask(pipe, image, budget, NEW_TOKENS, PROMPT)
    assert answer.kept.index.tolist() == [index]

    stages = stages_of(name, budget, answer.visual_tokens)
    later = embedded(torch_model, answer.token_ids[:-1])
    masked = masked_forward(torch_model, sequence, budget, stages, later=later)
    assert_equals_masked(answer, logits, sequence, masked)

    seen, lengths = len(index), []
    for layer in range(QWEN_SHAPES[name].num_layers):
        lengths.append(seen)
        seen = min(seen, stages.get(layer, seen))
    assert answer.tokens_per_layer == lengths


def test_an_image_of_one_token_has_nothing_to_prune(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("qwen", "fp32", BUDGETS)
    for budget in BUDGETS:
        with pytest.raises(PruningError, match="1 visual tokens and the budget"):
            pipe.generate(photo.resize((28, 28)), PROMPT, budget=budget, max_new_tokens=1)


def test_a_bundle_answers_images_of_any_size_in_turn(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("qwen", "fp32", BUDGETS)
    sizes = [(672, 560), (56, 56), (100, 400)]
    first = [pipe.generate(photo.resize(size), PROMPT, budget="prune-77.8", max_new_tokens=4) for size in sizes]
    again = [pipe.generate(photo.resize(size), PROMPT, budget="prune-77.8", max_new_tokens=4) for size in sizes]
    assert [answer.visual_tokens for answer in first] == [480, 4, 56]
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in again]


def test_fp16_runs_and_keeps_the_same_lengths(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    answer = pipeline("qwen", "fp16", ("prune-88.9",)).generate(
        photo.resize((672, 560)), PROMPT, budget="prune-88.9", max_new_tokens=3
    )
    assert answer.tokens_per_layer == [121, 86, 52, 52, 28, 28]
