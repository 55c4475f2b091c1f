"""Several images in one prompt, with text between them: unpruned equal to transformers, pruned equal to masking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.budgets import parse_budget
from support.programs.slow_cases import each_once, slow_except
from support.references.masking import Sequence as Rows
from support.references.masking import embedded, likeliest, masked_forward
from support.references.picture_prompts import BUDGETS, PIECES, SIZES, images_of, reference_inputs
from support.references.pruned_prompts import sanitized
from support.references.reference import one_stage
from support.references.same_answers import kept_sets
from support.references.steps import QUESTION, ask, patch_grid
from support.references.transformers_runs import assert_equals_transformers

Models, Folders, Pipelines = Callable[[str], Any], Callable[[str], Path], Callable[..., Pipeline]

Array = np.ndarray[Any, Any]

NEW_TOKENS = 8
CASES = [(name, budget) for name, budgets in BUDGETS.items() for budget in budgets]


@pytest.fixture
def pipe(pipeline: Pipelines) -> Callable[[str], Pipeline]:
    """A bundle for up to three images."""
    return lambda name: pipeline(name, "fp32", BUDGETS[name], max_images=3)


@pytest.mark.parametrize(("name", "pieces"), each_once(SIZES, [QUESTION, PIECES]))
def test_greedy_text_and_logits_equal_transformers(
    name: str,
    pieces: str | list[str],
    model: Models,
    checkpoint: Folders,
    pipe: Callable[[str], Pipeline],
    photo: Image.Image,
) -> None:
    images = images_of(name, photo)
    inputs = reference_inputs(name, checkpoint(name), images, pieces)
    assert_equals_transformers(model(name), inputs, pipe(name), images, pieces, NEW_TOKENS)


@torch.no_grad()
def masked_by_hand(
    model: Any, pipe: Pipeline, images: Sequence[Image.Image], budget: str, ids: list[int]
) -> tuple[Array, list[dict[int, list[int]]]]:
    """Logits from the last prompt row on, and what survives of each image, by the slow and obvious rules."""
    family, token = pipe.bundle.manifest.family, model.config.image_token_id
    texts = pipe.prompts.encode(PIECES).texts
    parts, groups, found, added = [embedded(model, texts[0])], [], [], []
    layers, options = pipe.bundle.manifest.language_model.num_layers, parse_budget(family, budget)
    nominal = 10_000 if pipe.bundle.manifest.any_resolution else None
    # Every row of the unpruned prompt, and which of them the pruned one holds
    every, taken = list(texts[0]), list(range(len(texts[0])))
    for image, text in zip(images, texts[1:], strict=True):
        tokens, indices, beside = sanitized(pipe, image, budget)
        added += [] if beside is None else [beside]
        if pipe.chain.projector is not None:
            tokens = model.model.multi_modal_projector(torch.from_numpy(tokens)[None])[0].numpy()
        start = sum(map(len, parts))
        groups.append(list(range(start, start + len(tokens))))
        layout = pipe.family.layout(image)
        found.append((one_stage(options, layout.tokens, layers, nominal), layout.groups))
        n = layout.tokens * layout.groups
        sources = [group * layout.tokens + i for group, index in enumerate(indices) for i in index]
        parts += [tokens, embedded(model, text)]
        taken += [len(every) + i for i in [*sources, *range(n, n + len(text))]]
        every += [token] * n + text
    rows, positions = np.concatenate(parts), None
    if family.startswith("qwen"):
        prompt = torch.tensor([every])
        grids = torch.tensor([patch_grid(pipe, image) for image in images])
        positions = model.model.get_rope_index(prompt, (prompt == token).int(), grids)[0][:, 0, taken].numpy()
    stages = {cut: [stage[cut] * many for stage, many in found] for cut in found[0][0]}
    visual, text_rows = [row for group in groups for row in group], list(range(groups[-1][-1] + 1, len(rows)))
    deepstack = np.concatenate(added, axis=1) if added else None
    sequence = Rows(rows, visual, text_rows, positions, family, groups, deepstack)
    masked = masked_forward(model, sequence, budget, stages, later=embedded(model, ids))
    survivors = [
        {cut: [row - group[0] for row in kept if row in group] for cut, kept in masked.survivors.items()}
        for group in groups
    ]
    return masked.logits[len(rows) - 1 :], survivors


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_pruned_equals_the_masked_full_sequence(
    name: str, budget: str, model: Models, pipe: Callable[[str], Pipeline], photo: Image.Image
) -> None:
    images = images_of(name, photo)
    answer, logits = ask(pipe(name), images, budget, NEW_TOKENS, PIECES)
    expected, survivors = masked_by_hand(model(name), pipe(name), images, budget, answer.token_ids[:-1])
    kept = [{layer: rows.tolist() for layer, rows in image.after_stage.items()} for image in answer.images]
    assert kept == survivors
    assert np.abs(logits - expected).max() < 1e-3
    assert answer.token_ids == likeliest(expected, pipe(name).bundle.manifest.tokens.stop)


@pytest.mark.parametrize("name", slow_except({"gqa-112", "qwen"}, SIZES))
def test_one_image_is_pruned_as_by_a_bundle_for_one(
    name: str, pipe: Callable[[str], Pipeline], pipeline: Pipelines, photo: Image.Image
) -> None:
    for budget in BUDGETS[name]:
        pipes = pipe(name), pipeline(name, "fp32", BUDGETS[name])
        found, expected = (ask(one, photo.resize((280, 336)), budget, 4)[0] for one in pipes)
        assert found.token_ids == expected.token_ids
        assert kept_sets(found) == kept_sets(expected)
