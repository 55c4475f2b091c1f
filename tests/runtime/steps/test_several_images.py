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
from support.references.reference import beside_kept, one_stage, sanitize_at
from support.references.steps import QUESTION, ask, deepstack_output, patch_grid, tower_output

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
    with torch.no_grad():
        expected = model(name).generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    answer, logits = ask(pipe(name), images, "none", NEW_TOKENS, pieces)
    length = inputs["input_ids"].shape[1]
    assert answer.tokens_per_layer[0] + answer.prompt_tokens == length
    assert np.abs(logits - torch.stack(expected.logits)[:, 0].numpy()).max() < 1e-3
    assert answer.token_ids == expected.sequences[0, length:].tolist()


def sanitized(pipe: Pipeline, image: Image.Image, budget: str) -> tuple[Array, list[int], int]:
    """An image's kept tokens, their sources counted through all groups, and how many tokens it had."""
    groups = zip(*tower_output(pipe, image), strict=True)
    options, kept, sources, n = parse_budget(pipe.bundle.manifest.family, budget), [], [], 0
    for tokens, norms, salience in groups:
        tokens, index = sanitize_at(options, tokens, norms, salience)
        kept.append(tokens)
        sources += [n + i for i in index]
        n += len(norms)
    return np.concatenate(kept), sources, n


@torch.no_grad()
def masked_by_hand(
    model: Any, pipe: Pipeline, images: Sequence[Image.Image], budget: str, ids: list[int]
) -> tuple[Array, list[dict[int, list[int]]]]:
    """Logits from the last prompt row on, and what survives of each image, by the slow and obvious rules."""
    family, token = pipe.bundle.manifest.family, model.config.image_token_id
    texts = pipe.prompts.encode(PIECES).texts
    parts, groups, kept, added = [embedded(model, texts[0])], [], [], []
    # Every row of the unpruned prompt, and which of them the pruned one holds
    every, taken = list(texts[0]), list(range(len(texts[0])))
    for image, text in zip(images, texts[1:], strict=True):
        tokens, sources, n = sanitized(pipe, image, budget)
        beside = deepstack_output(pipe, image)
        if beside is not None:
            norms, sink = tower_output(pipe, image)[1][0], "no-sanitizer" not in budget
            added.append(beside_kept(beside[:, 0], norms, sources, sink=sink))
        if pipe.chain.projector is not None:
            tokens = model.model.multi_modal_projector(torch.from_numpy(tokens)[None])[0].numpy()
        start = sum(map(len, parts))
        groups.append(list(range(start, start + len(tokens))))
        layout = pipe.family.layout(image)
        kept.append((layout.tokens, layout.groups))
        parts += [tokens, embedded(model, text)]
        taken += [len(every) + i for i in [*sources, *range(n, n + len(text))]]
        every += [token] * n + text
    rows, positions = np.concatenate(parts), None
    if family.startswith("qwen"):
        prompt = torch.tensor([every])
        grids = torch.tensor([patch_grid(pipe, image) for image in images])
        positions = model.model.get_rope_index(prompt, (prompt == token).int(), grids)[0][:, 0, taken].numpy()
    layers, options = pipe.bundle.manifest.language_model.num_layers, parse_budget(family, budget)
    nominal = 10_000 if pipe.bundle.manifest.any_resolution else None
    found = [(one_stage(options, n, layers, nominal), many) for n, many in kept]
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
    compact = "compact" in budget
    assert np.abs((logits - expected)[: 1 if compact else None]).max() < 1e-3
    if not compact:
        assert answer.token_ids == likeliest(expected, pipe(name).bundle.manifest.tokens.stop)


@pytest.mark.parametrize("name", slow_except({"gqa-112", "qwen"}, SIZES))
def test_one_image_is_pruned_as_by_a_bundle_for_one(
    name: str, pipe: Callable[[str], Pipeline], pipeline: Pipelines, photo: Image.Image
) -> None:
    for budget in BUDGETS[name]:
        answers = [
            pipe_.generate(photo.resize((280, 336)), QUESTION, budget=budget, max_new_tokens=4)
            for pipe_ in (pipe(name), pipeline(name, "fp32", BUDGETS[name]))
        ]
        assert answers[0].token_ids == answers[1].token_ids
        after = [{layer: rows.tolist() for layer, rows in x.kept.after_stage.items()} for x in answers]
        assert after[0] == after[1]
