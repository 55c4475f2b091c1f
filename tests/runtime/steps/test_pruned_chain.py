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
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.decoding import decode_one_token, first_logits, surviving_rows
from support.models.small_models import SHAPES
from support.programs.slow_cases import slow_except
from support.references.masking import assert_survivors, embedded, masked_forward
from support.references.pruned_prompts import prompt_rows, sanitized
from support.references.steps import watched

Models, Pipelines, Bundles = Callable[[str], Any], Callable[..., Pipeline], Callable[..., Path]
PROMPT = "Describe the image, please: which colour is the cup?"
NEW_TOKENS = 8
# Visual tokens before and after the stage, of 576 and of 64.
COUNTS = {
    "retain-192": {"mha-336": (385, 202), "gqa-112": (43, 21)},
    "retain-128": {"mha-336": (257, 135), "gqa-112": (29, 14)},
    "retain-64": {"mha-336": (129, 68), "gqa-112": (15, 7)},
    "retain-32": {"mha-336": (65, 34), "gqa-112": (7, 3)},
    "retain-64+compact": {"mha-336": (129, 68), "gqa-112": (15, 7)},
    "retain-64+no-sanitizer": {"mha-336": (576, 68), "gqa-112": (64, 7)},
    "retain-64+visual-keys": {"mha-336": (129, 68), "gqa-112": (15, 7)},
    "retain-64+raster": {"mha-336": (129, 68), "gqa-112": (15, 7)},
    "retain-64+keep-outliers": {"mha-336": (128, 68), "gqa-112": (14, 7)},
    "retain-64+drop-sink": {"mha-336": (128, 68), "gqa-112": (14, 7)},
    "retain-64+no-diversity": {"mha-336": (65, 56), "gqa-112": (8, 6)},
    "retain-32+raster+visual-keys+compact": {"mha-336": (65, 34), "gqa-112": (7, 3)},
}
BUDGETS = tuple(COUNTS)
# The larger picture with every third budget: what differs by its size is the same for all.
CASES = [
    (name, budget) for name in SHAPES for place, budget in enumerate(BUDGETS) if name != "mha-336" or place % 3 == 0
]


def lengths_of(name: str, budget: str) -> list[int]:
    """The visual tokens of every layer."""
    first, *_ = prune_layers(SHAPES[name].num_layers)
    return [COUNTS[budget][name][layer > first] for layer in range(SHAPES[name].num_layers)]


@pytest.mark.parametrize(("name", "budget"), slow_except(CASES[::2], CASES))
def test_prefill_and_decode_equal_the_masked_full_sequence(
    name: str, budget: str, model: Models, pipeline: Pipelines, photo: Image.Image
) -> None:
    torch_model, pipe = model(name), pipeline(name, "fp32", BUDGETS)
    kept, indices, beside = sanitized(pipe, photo, budget)
    sequence = prompt_rows(torch_model, pipe, photo, PROMPT, kept, indices, beside)
    first, *_ = prune_layers(SHAPES[name].num_layers)
    stages = {first: COUNTS[budget][name][1]}
    steps = watched(pipe, photo, PROMPT, budget=budget, max_new_tokens=1)
    result, laid_out = steps.prefill, steps.rows
    rows = laid_out.length
    text = rows - COUNTS[budget][name][0]
    assert rows == len(sequence.rows)
    logits = [pipe.backend.numpy(first_logits(pipe.chain, result, Stopwatch(pipe.backend)))[0]]

    ids = [int(logits[0].argmax())]
    for _ in range(NEW_TOKENS):
        step = decode_one_token(pipe.chain, result.cache, pipe.embedding([ids[-1]])[0])
        logits.append(pipe.backend.numpy(step)[0])
        ids.append(int(logits[-1].argmax()))

    masked = masked_forward(torch_model, sequence, budget, stages, later=embedded(torch_model, ids[:-1]))
    survivors = surviving_rows(pipe.backend, laid_out, result)
    assert {layer: kept.tolist() for layer, kept in survivors.items()} == masked.survivors
    assert np.abs(np.array(logits) - masked.logits[rows - 1 :]).max() < 1e-3
    assert masked.logits[rows - 1 :].argmax(axis=1).tolist() == ids

    answer = pipe.generate(photo, PROMPT, budget=budget, max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1)
    assert answer.token_ids == ids
    assert answer.kept.index.tolist() == indices
    assert_survivors(answer, sequence, masked)
    assert answer.tokens_per_layer == lengths_of(name, budget)
    assert answer.prompt_tokens == text


@pytest.mark.parametrize("name", SHAPES)
def test_one_bundle_serves_every_budget_on_weights_loaded_once(
    name: str, bundle: Bundles, photo: Image.Image
) -> None:
    loaded: list[str] = []

    def counted(graph: str, engine: Engine, backend: Backend) -> Engine:
        loaded.append(graph)
        return engine

    pipe = Pipeline.load(bundle(name, "fp32", BUDGETS), check_sums=False, wrap=counted)
    planned = {graph for plan in pipe.bundle.manifest.plans["sinkpruner"].values() for graph in plan.graphs}
    weighted = {"vision", "projector", "decoder_0", "decoder_1", "decoder_2", "head"}
    assert {*pipe.bundle.manifest.graphs} - planned == weighted
    answers: dict[str, list[Answer]] = {}
    for budget in ("none", *BUDGETS, *reversed(BUDGETS), "none"):
        answer = pipe.generate(photo, PROMPT, budget=budget, max_new_tokens=4, min_new_tokens=4)
        assert budget != "none" or sorted(loaded) == sorted(weighted | planned if answers else weighted)
        answers.setdefault(budget, []).append(answer)
    for budget, (one, other) in answers.items():
        assert (one.budget, one.method, one.token_ids) == (budget, "sinkpruner", other.token_ids)
        np.testing.assert_array_equal(one.kept.index, other.kept.index)
        lengths = [(SHAPES[name].image_size // 14) ** 2] * SHAPES[name].num_layers
        assert one.tokens_per_layer == (lengths if budget == "none" else lengths_of(name, budget))
    assert answers["none"][0].kept.after_stage == {}
