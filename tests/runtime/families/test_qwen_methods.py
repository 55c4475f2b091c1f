"""Every method on Qwen's families: what is kept is its reference's, and answers equal the masked full sequence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline, Session, UsageError
from sinkprune.contract.budgets import Plan
from sinkprune.export.bundle_writer import Unreachable, export_bundle
from sinkprune.export.families import read_family
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.pruning.plan import VariableTokens
from sinkprune.export.source import ExportRequest
from support.programs.slow_cases import slow_except
from support.references.kept_tokens import choose_tops, kept_of
from support.references.masking import assert_equals_masked, embedded, masked_forward
from support.references.pruned_prompts import prompt_rows
from support.references.reference_methods import IN_LLM, asking_rows
from support.references.steps import ask, deepstack_output, tower_output

PROMPT = "Which colour is the cup?"
NEW_TOKENS = 4
METHODS = tuple(ALL_METHODS)
BUDGETS = ("prune-66.7", "prune-88.9")
NAMES = ("qwen-tied", "qwen2-vl", "qwen3-vl")
# Smaller pictures drop no token, and a random choice has no reference.
DROPPING = [method for method in METHODS if method not in ("random", "downsample", "downsample-ttft")]
# Each method with one checkpoint, and SinkPruner with all: methods differ in front of the decoder, checkpoints in it.
FEW = {*zip(cycle(NAMES), DROPPING, strict=False), *((name, "sinkpruner") for name in NAMES)}
SIZE = (300, 700)


@pytest.fixture(scope="module")
def bundles(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pipeline]:
    """A loaded bundle of every method, of the checkpoint of a name."""
    made: dict[str, Pipeline] = {}

    def get(name: str) -> Pipeline:
        if name not in made:
            left_out: list[Unreachable] = []
            folder = tmp_path_factory.mktemp("methods") / name
            request = ExportRequest(str(checkpoint(name)), BUDGETS, METHODS, max_frames=4)
            export_bundle(request, folder, left_out=left_out.append)
            inside = {*IN_LLM, "sinkpruner-no-sanitizer"}
            assert {(plan.method, plan.budget) for plan in left_out} == {(one, "prune-88.9") for one in inside}
            made[name] = Pipeline.load(folder)
        return made[name]

    return get


def plan_of(pipe: Pipeline, method: str, budget: str) -> Plan:
    return pipe.bundle.manifest.plans[method][budget]


@pytest.mark.parametrize(("name", "method"), slow_except(FEW, product(NAMES, DROPPING)))
def test_answers_equal_the_masked_full_sequence(
    name: str, method: str, bundles: Callable[[str], Pipeline], model: Callable[[str], Any], photo: Image.Image
) -> None:
    budget = "prune-66.7"
    torch_model, pipe, image = model(name), bundles(name), photo.resize(SIZE)
    plan = plan_of(pipe, method, budget)
    beside = deepstack_output(pipe, image)
    flat = None if beside is None else np.concatenate([*beside[:, 0]], axis=-1)
    question = embedded(torch_model, pipe.prompts.tokenizer.encode(PROMPT, add_special_tokens=False).ids)
    features = [array[0] for array in tower_output(pipe, image)]
    assert plan.shares is not None
    counts, whole = plan.shares.resolve(len(features[1])), features[0]
    if plan.sanitizer is None:
        rows, index = (whole if flat is None else np.concatenate([whole, flat], axis=-1)), [*range(len(whole))]
    else:
        rows, index = kept_of(method, counts, features, question, beside=flat, any_size=True)
    width = torch_model.model.language_model.embed_tokens.weight.shape[1]
    sets = [rows[:, place : place + width] for place in range(width, rows.shape[1], width)]
    beside = np.stack(sets) if sets else None
    sequence = prompt_rows(torch_model, pipe, image, PROMPT, rows[:, :width], [index], beside)

    answer, logits = ask(pipe, image, budget, NEW_TOKENS, PROMPT, method)
    assert answer.kept.index.tolist() == [index]
    stages = dict(zip(plan.cuts, plan.shares.resolve(answer.visual_tokens).stages, strict=True))
    asking = partial(asking_rows, method)
    later = embedded(torch_model, answer.token_ids[:-1])
    chosen = {"choose": choose_tops} if method == "tops" else {}
    masked = masked_forward(torch_model, sequence, budget, stages, later, asking, **chosen)
    assert_equals_masked(answer, logits, sequence, masked, pipe.bundle.manifest.tokens.stop)


@pytest.mark.parametrize("name", NAMES)
def test_a_smaller_picture_is_that_picture_unpruned(
    name: str, bundles: Callable[[str], Pipeline], photo: Image.Image
) -> None:
    pipe, image = bundles(name), photo.resize((672, 560))
    processor, whole = pipe.bundle.manifest.processor, pipe.family.layout(image)
    unit = processor["patch_size"] * processor["merge_size"]
    for budget, share in (("prune-66.7", plan_of(pipe, "downsample", "prune-66.7").picture_share), ("none", None)):
        answer = pipe.generate(image, PROMPT, method="downsample", budget=budget, max_new_tokens=4, min_new_tokens=4)
        columns, rows = (round(size / answer.kept.layout.boxes[0, axis]) for axis, size in ((2, 672), (3, 560)))
        assert answer.kept.layout.size == (672, 560) and answer.visual_tokens == rows * columns
        most = whole.tokens if share is None else share.of(whole.tokens)
        assert 0.95 * most < answer.visual_tokens <= most
        small = image.resize((columns * unit, rows * unit), Image.Resampling.BICUBIC)
        alone = pipe.generate(small, PROMPT, max_new_tokens=4, min_new_tokens=4)
        assert (answer.token_ids, answer.tokens_per_layer) == (alone.token_ids, alone.tokens_per_layer)
        # A session does not take one size for the other.
        session = Session(pipe)
        for method, own in (("sinkpruner", "none"), ("downsample", budget), ("downsample", budget)):
            again = session.generate(image, PROMPT, method=method, budget=own, max_new_tokens=4, min_new_tokens=4)
        assert again.token_ids == answer.token_ids and again.reused_towers == 1
        with pytest.raises(UsageError, match="makes pictures smaller before the vision tower runs"):
            pipe.generate(image, PROMPT, method="downsample", deadline_ms=500.0, budget=budget)


@pytest.mark.parametrize("name", NAMES)
def test_the_exporter_s_flops_of_a_tower_are_the_runtime_s(
    name: str, bundles: Callable[[str], Pipeline], checkpoint: Callable[[str], Path]
) -> None:
    pipe, config = bundles(name), json.loads((checkpoint(name) / "config.json").read_text())
    family, processor = read_family(name, config), pipe.bundle.manifest.processor
    tokens = family.tokens_of(processor)
    assert isinstance(tokens, VariableTokens) and tokens.tower_flops is not None
    # Whole windows.
    for side in (4, 8, 12):
        size = side * processor["patch_size"] * processor["merge_size"]
        layout = pipe.family.layout(Image.new("RGB", (size, size)))
        assert layout.tokens == side**2 and layout.tower_flops == tokens.tower_flops(side**2)
