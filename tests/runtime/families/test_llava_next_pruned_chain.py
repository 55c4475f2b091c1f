"""A pruned LLaVA-NeXT answer: every tile sanitised apart, then equal to the full sequence with masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.families import parse_budget
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.small_models import NEXT_SHAPES
from support.programs.slow_cases import each_once
from support.references.masking import Sequence, assert_survivors, embedded, masked_forward
from support.references.reference import sanitize
from support.references.steps import QUESTION, ask, tower_output

NEW_TOKENS = 6
BUDGETS = ("retain-320", "retain-160", "retain-320+no-sanitizer", "retain-320+raster", "retain-160+compact")
# Visual tokens of one tile before the first stage and after each, of 64
COUNTS = {
    "retain-320": (15, 12, 8, 4),
    "retain-160": (7, 6, 4, 2),
    "retain-320+no-sanitizer": (64, 12, 8, 4),
    "retain-320+raster": (15, 12, 8, 4),
    "retain-160+compact": (7, 6, 4, 2),
}
# By the number of groups: the whole image and two, three and four tiles
SIZES = {3: (300, 150), 4: (100, 400), 5: (230, 200)}


@torch.no_grad()
def expected_sequence(
    model: Any, pipe: Pipeline, image: Image.Image, budget: str
) -> tuple[Sequence, list[list[int]]]:
    """[before ; Z of each group ; after] by the reference's sanitizer, projected by transformers, and Z's sources."""
    groups = zip(*tower_output(pipe, image), strict=True)
    options, kept, indices = parse_budget("llava-next", budget), [], []
    for tokens, norms, salience in groups:
        index = list(range(len(tokens)))
        if options.sanitizer:
            reserve, diverse = options.reserve.of(len(tokens)), options.diverse.of(len(tokens))
            raster = options.order == "raster"
            tokens, index = sanitize(tokens, norms, salience, reserve=reserve, diverse=diverse, raster=raster)
        kept.append(tokens)
        indices.append(index)
    rows = model.model.multi_modal_projector(torch.from_numpy(np.concatenate(kept))[None])[0].numpy()
    question = pipe.prompts.encode(["", QUESTION])
    before, after = (embedded(model, ids) for ids in (question.texts[0], question.texts[-1]))
    start, end = len(before), len(before) + len(rows)
    sequence = np.concatenate([before, rows, after])
    visual, text = list(range(start, end)), list(range(end, len(sequence)))
    return Sequence(sequence, visual, text, family="llava-next"), indices


@pytest.mark.parametrize(("name", "groups", "budget"), each_once(NEXT_SHAPES, SIZES, BUDGETS))
def test_prefill_and_decode_equal_the_masked_full_sequence(
    name: str,
    groups: int,
    budget: str,
    model: Callable[[str], Any],
    pipeline: Callable[..., Pipeline],
    photo: Image.Image,
) -> None:
    torch_model, pipe, image = model(name), pipeline(name, "fp32", BUDGETS), photo.resize(SIZES[groups])
    sequence, indices = expected_sequence(torch_model, pipe, image, budget)
    answer, logits = ask(pipe, image, budget, NEW_TOKENS)
    assert answer.kept.index.tolist() == indices
    assert len(indices) == groups

    layers = NEXT_SHAPES[name].num_layers
    stages = {cut: groups * count for cut, count in zip(prune_layers(layers), COUNTS[budget][1:], strict=True)}
    later = embedded(torch_model, answer.token_ids[:-1])
    masked = masked_forward(torch_model, sequence, budget, stages, later=later)
    assert_survivors(answer, sequence, masked)
    expected = masked.logits[len(sequence.rows) - 1 :]
    if "compact" not in budget:
        assert np.abs(logits - expected).max() < 1e-3
        assert answer.token_ids == expected.argmax(axis=1).tolist()
    else:
        assert np.abs(logits[0] - expected[0]).max() < 1e-3
    cuts = prune_layers(layers)
    reached = [COUNTS[budget][sum(layer > cut for cut in cuts)] for layer in range(layers)]
    assert answer.tokens_per_layer == [groups * count for count in reached]


@pytest.mark.parametrize(
    ("budget", "lengths"), [("retain-320", (645, 550, 370, 210)), ("retain-160", (325, 270, 180, 110))]
)
def test_five_tiles_of_576_have_the_counts_of_the_paper(budget: str, lengths: tuple[int, ...]) -> None:
    counts = parse_budget("llava-next", budget).resolve(576).of_groups(5)
    assert (5 * counts.kept, *counts.stages) == lengths


def test_other_methods_keep_the_same_mean_of_every_tile(
    checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    methods = ("sinkpruner", "fastervlm", "visionzip", "sinkpruner-no-diversity", "sinkpruner-no-text-pruner")
    request = ExportRequest(str(checkpoint("next-mistral")), budgets=("retain-320",), methods=methods)
    export_bundle(request, tmp_path / "bundle")
    pipe = Pipeline.load(tmp_path / "bundle")
    means = []
    for method in methods:
        answer = pipe.generate(photo, QUESTION, budget="retain-320", method=method, max_new_tokens=1)
        means.append(sum(answer.tokens_per_layer) / len(answer.tokens_per_layer) / len(answer.kept.norms))
    assert means == pytest.approx([means[0]] * len(methods), abs=0.5)


def test_fp16_runs_and_keeps_the_same_lengths(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    answer, _ = ask(pipeline("next", "fp16", ("retain-320",)), photo.resize(SIZES[5]), "retain-320", 3)
    assert answer.tokens_per_layer == [75, 60, 40, 40, 20, 20]
