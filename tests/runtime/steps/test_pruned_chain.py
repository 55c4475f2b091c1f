"""A pruned answer equals the full sequence with the dropped tokens masked, in the checkpoint's own layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.decoding import Prefill, decode_one_token, first_logits, surviving_rows
from support.models.small_models import SHAPES
from support.programs.slow_cases import slow_except
from support.references.masking import assert_survivors, embedded, masked_forward
from support.references.pruned_prompts import prompt_rows, sanitized
from support.references.steps import layout_of, watched

PROMPT = "Describe the image, please: which colour is the cup?"
NEW_TOKENS = 8
# Visual tokens before and after the stage, of 576 and of 64.
COUNTS = {
    "mha-336": {
        "retain-192": (385, 202),
        "retain-128": (257, 135),
        "retain-64": (129, 68),
        "retain-32": (65, 34),
        "retain-64+compact": (129, 68),
        "retain-64+no-sanitizer": (576, 68),
        "retain-64+visual-keys": (129, 68),
        "retain-64+raster": (129, 68),
        "retain-64+keep-outliers": (128, 68),
        "retain-64+drop-sink": (128, 68),
        "retain-64+no-diversity": (65, 56),
        "retain-32+raster+visual-keys+compact": (65, 34),
    },
    "gqa-112": {
        "retain-192": (43, 21),
        "retain-128": (29, 14),
        "retain-64": (15, 7),
        "retain-32": (7, 3),
        "retain-64+compact": (15, 7),
        "retain-64+no-sanitizer": (64, 7),
        "retain-64+visual-keys": (15, 7),
        "retain-64+raster": (15, 7),
        "retain-64+keep-outliers": (14, 7),
        "retain-64+drop-sink": (14, 7),
        "retain-64+no-diversity": (8, 6),
        "retain-32+raster+visual-keys+compact": (7, 3),
    },
}
BUDGETS = tuple(COUNTS["mha-336"])
# The larger picture with every third budget: what differs by its size is the same for all.
CASES = [
    (name, budget) for name in SHAPES for place, budget in enumerate(BUDGETS) if name != "mha-336" or place % 3 == 0
]


def stages_of(name: str, budget: str) -> dict[int, int]:
    """Visual rows that the pruning layer leaves."""
    first, *_ = prune_layers(SHAPES[name].num_layers)
    return {first: COUNTS[name][budget][1]}


def lengths_of(name: str, budget: str, text: int) -> list[int]:
    """The sequence length of every layer: T + n0, T + K."""
    first, *_ = prune_layers(SHAPES[name].num_layers)
    return [text + COUNTS[name][budget][layer > first] for layer in range(SHAPES[name].num_layers)]


def cache_lengths(result: Prefill) -> list[int]:
    """How many rows of every layer's buffers are filled: behind them all are zero."""
    buffers = [cache.buffers.items() for cache in result.cache.segments]
    keys = [tensor.numpy() for segment in buffers for name, tensor in segment if "key" in name]
    return [int(np.flatnonzero(np.any(key != 0, axis=(0, 1, 3)))[-1]) + 1 for key in keys]


@pytest.mark.parametrize(("name", "budget"), slow_except(CASES[::2], CASES))
def test_prefill_and_decode_equal_the_masked_full_sequence(
    name: str, budget: str, model: Callable[[str], Any], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    torch_model, pipe = model(name), pipeline(name, "fp32", BUDGETS)
    kept, indices, beside = sanitized(pipe, photo, budget)
    sequence = prompt_rows(torch_model, pipe, photo, PROMPT, kept, indices, beside)
    stages = stages_of(name, budget)
    masked = masked_forward(torch_model, sequence, budget, stages)

    steps = watched(pipe, photo, PROMPT, budget=budget, max_new_tokens=1)
    result, laid_out = steps.prefill, steps.rows
    rows = laid_out.length
    text = rows - COUNTS[name][budget][0]
    assert rows == len(sequence.rows)
    planned = schedule(pipe.bundle.manifest, "sinkpruner", budget, [layout_of(pipe.family, photo.size)])
    assert result.schedule == planned
    survivors = surviving_rows(pipe.backend, laid_out, result)
    assert {layer: kept.tolist() for layer, kept in survivors.items()} == masked.survivors
    logits = [pipe.backend.numpy(first_logits(pipe.chain, result, Stopwatch(pipe.backend)))[0]]
    assert np.abs(logits[0] - masked.logits[-1]).max() < 1e-3
    lengths = lengths_of(name, budget, text)
    assert cache_lengths(result) == lengths
    per_layer = result.schedule.per_layer(len(lengths))
    assert per_layer == [length - text for length in lengths]
    position = [length if "compact" in budget else rows for length in lengths]
    assert positions_of(result) == position

    ids = [int(logits[0].argmax())]
    for _ in range(NEW_TOKENS):
        step = decode_one_token(pipe.chain, result.cache, pipe.embedding([ids[-1]])[0])
        logits.append(pipe.backend.numpy(step)[0])
        ids.append(int(logits[-1].argmax()))
    assert cache_lengths(result) == [length + NEW_TOKENS for length in lengths]
    assert positions_of(result) == [place + NEW_TOKENS for place in position]

    longer = masked_forward(torch_model, sequence, budget, stages, later=embedded(torch_model, ids[:-1]))
    assert longer.survivors == masked.survivors
    assert np.abs(np.array(logits) - longer.logits[rows - 1 :]).max() < 1e-3
    assert longer.logits[rows - 1 :].argmax(axis=1).tolist() == ids

    answer = pipe.generate(photo, PROMPT, budget=budget, max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1)
    assert answer.token_ids == ids
    assert answer.kept.index.tolist() == indices
    assert_survivors(answer, sequence, masked)
    assert answer.tokens_per_layer == lengths_of(name, budget, 0)
    assert answer.prompt_tokens == text


def positions_of(result: Prefill) -> list[int]:
    """The position id of the next token in every layer."""
    per_segment = zip(result.cache.segments, result.cache.next_positions, strict=True)
    return [position for cache, position in per_segment for _ in range(len(cache.buffers) // 2)]


def answer_of(pipe: Pipeline, image: Image.Image, budget: str) -> Answer:
    """A short greedy answer."""
    return pipe.generate(image, PROMPT, budget=budget, max_new_tokens=4, min_new_tokens=4)


@pytest.mark.parametrize("name", SHAPES)
def test_one_bundle_serves_every_budget_and_none_on_weights_loaded_once(
    name: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    loaded: list[str] = []

    def counted(graph: str, engine: Engine, backend: Backend) -> Engine:
        loaded.append(graph)
        return engine

    pipe = Pipeline.load(bundle(name, "fp32", BUDGETS), check_sums=False, wrap=counted)
    manifest = pipe.bundle.manifest
    planned = {graph for plan in manifest.plans["sinkpruner"].values() for graph in plan.graphs}
    weighted = {*manifest.graphs} - planned
    assert weighted == {"vision", "projector", "decoder_0", "decoder_1", "decoder_2", "head"}

    before = answer_of(pipe, photo, "none")
    assert sorted(loaded) == sorted(weighted)
    first = {budget: answer_of(pipe, photo, budget) for budget in BUDGETS}
    again = {budget: answer_of(pipe, photo, budget) for budget in reversed(BUDGETS)}
    after = answer_of(pipe, photo, "none")
    assert sorted(loaded) == sorted(weighted | planned)

    visual = SHAPES[name].image_size // 14
    assert before.tokens_per_layer == [visual**2] * SHAPES[name].num_layers
    assert before.kept.after_stage == {}
    for one, other in [(before, after), *((first[budget], again[budget]) for budget in BUDGETS)]:
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.tokens_per_layer == other.tokens_per_layer
        np.testing.assert_array_equal(one.kept.index, other.kept.index)
    for budget, answer in first.items():
        assert (answer.budget, answer.method) == (budget, "sinkpruner")
        assert answer.tokens_per_layer == lengths_of(name, budget, 0)
