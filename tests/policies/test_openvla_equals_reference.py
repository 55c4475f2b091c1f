"""OpenVLA and OpenVLA-OFT against a plain reference: unpruned, by every method, and with dropped tokens masked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.policies.test_pi0_equals_reference import tower_outputs

from sinkprune import Policy
from sinkprune.contract.budgets import parse_budget
from sinkprune.export.bundle_writer import Unreachable, export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.source import ExportRequest
from sinkprune.policies.report import ActionReport
from support.models.small_models import OPENVLA_SHAPES, OPENVLA_TOKEN_SHAPES
from support.programs.slow_cases import slow_except
from support.references.kept_tokens import choose_tops, kept_of
from support.references.openvla import INSTRUCTION, OpenVlaReference
from support.references.pi0 import frames
from support.references.reference import one_stage
from support.references.reference_methods import IN_LLM, asking_rows

Policies = Callable[..., Policy]
References = Callable[[str], OpenVlaReference]

Array = np.ndarray[Any, Any]
BUDGETS = (
    "prune-66.7",
    "prune-77.8",
    "prune-80+no-sanitizer",
    "prune-88.9+raster+visual-keys",
    "prune-77.8+drop-sink+action-rows",
)
ENDS = ("q01", "q99")
SHAPES = {**OPENVLA_SHAPES, **OPENVLA_TOKEN_SHAPES}


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> References:
    """A small checkpoint in plain torch."""
    return cache(lambda name: OpenVlaReference(checkpoint(name)))


@pytest.fixture(scope="module")
def policy(bundle: Callable[..., Path]) -> Policies:
    """A loaded small policy of two cameras, or as many."""

    @cache
    def get(name: str, cameras: int = 2, dialect: str = "opset24") -> Policy:
        budgets = BUDGETS if "oft" in name else BUDGETS[:-1]
        return Policy.load(bundle(name, budgets=budgets, max_images=cameras, dialect=dialect))

    return get


def drawn(name: str) -> list[float]:
    """A state, of which some numbers lie outside the ranges of the training."""
    return np.random.default_rng(1).uniform(-2.5, 2.5, SHAPES[name].state_dim).tolist()


def assert_equal(
    report: ActionReport, model: OpenVlaReference, name: str, towers: Any, stages: Any, **options: Any
) -> None:
    """Compare a chunk and its tokens with the reference at these `options`: the budget, and what a method keeps."""
    shape, budget = SHAPES[name], options["budget"]
    (data_set,) = shape.data_sets
    state = model.normalised_state(drawn(name), data_set, ENDS) if shape.state_dim else None
    placeholders = shape.chunk * shape.action_dim if shape.head else 0
    rows = model.rows(towers, INSTRUCTION, state, placeholders, budget, options.pop("chosen", None))
    run = model.run(rows, stages=stages and {cut: [kept] * len(towers) for cut, kept in stages.items()}, **options)
    if shape.head:
        actions = model.actions(run.hidden, shape.chunk, shape.action_dim)
        assert np.abs(actions).max() > 1, "clipped actions would pass"
    else:
        tokens, actions = model.token_actions(rows, shape.action_dim, run)
        assert len(set(tokens)) > 2 and all(31744 <= token < 32000 for token in tokens)
    np.testing.assert_allclose(report.actions, model.in_robots_units(actions, data_set, ENDS), atol=1e-3)
    text = len(rows.values) - sum(map(len, rows.cameras))
    assert report.prompt_tokens == text
    assert report.tokens_per_layer == [int(seen.sum()) - text for seen in run.visible], budget
    assert [kept.index.ravel().tolist() for kept in report.images] == rows.sources, budget
    for cut, left in run.survivors.items():
        cameras = [[camera.index(row) for row in left if row in camera] for camera in rows.cameras]
        assert [kept.after_stage[cut].tolist() for kept in report.images] == cameras, budget


@pytest.mark.parametrize(
    ("name", "budget", "cameras", "dialect"),
    [
        *((name, None, 2, "opset24") for name in OPENVLA_SHAPES),
        ("openvla-oft", None, 1, "opset24"),
        *(("openvla-oft", budget, 2, "opset24") for budget in BUDGETS),
        ("openvla-oft", "prune-77.8", 2, "opset20"),
        ("openvla-oft-bridge", "prune-66.7", 2, "opset24"),
        ("openvla-oft-stateless", "prune-88.9+raster+visual-keys", 2, "opset24"),
        *(
            (name, budget, 1, "opset24")
            for name in OPENVLA_TOKEN_SHAPES
            for budget in (None, "prune-66.7", "prune-88.9+raster+visual-keys")
        ),
    ],
)
def test_chunks_equal_the_reference_with_masked_tokens(
    name: str,
    budget: str | None,
    cameras: int,
    dialect: str,
    policy: Policies,
    reference: References,
    photo: Image.Image,
) -> None:
    model, seen = reference(name), frames(photo, cameras)
    report = policy(name, cameras, dialect).act(seen, INSTRUCTION, drawn(name), budget=budget or "none")
    towers, stages = model.towers(seen), None
    if budget is not None:
        stages = one_stage(parse_budget("openvla-oft", budget), len(towers[0][0]), SHAPES[name].num_layers)
        assert report.tokens_per_layer[-1] < report.visual_tokens
    assert_equal(report, model, name, towers, stages, budget=budget)
    assert (report.steps, len(report.step_ms), report.in_robots_units) == (1, 1, True)


METHOD_BUDGETS = ("prune-66.7", "prune-77.8", "prune-80", "prune-88.9")
CAMERAS = {"openvla-oft": 2, "openvla": 1}
FAST = {("openvla-oft", "opset24", "vscan")}
READ_ONE_ROW = ("fastv", "vscan")


@pytest.fixture(scope="module")
def with_methods(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """A policy with those of `FAST`, or with every method at every budget."""

    @cache
    def get(name: str, dialect: str, *, fast: bool) -> Policy:
        source, left_out = checkpoint(name), list[Unreachable]()
        options = {"methods": tuple(ALL_METHODS), "max_images": CAMERAS[name], "dialect": dialect}
        if fast:
            options |= {"budgets": METHOD_BUDGETS[:1], "methods": tuple(method for *_, method in FAST)}
        folder = tmp_path_factory.mktemp("methods") / name
        export_bundle(ExportRequest(str(source), **options), folder, left_out=left_out.append)
        # Their first layers run on all tokens.
        inside = () if fast else product((*IN_LLM, "sinkpruner-no-sanitizer"), METHOD_BUDGETS[1:])
        assert {(plan.method, plan.budget) for plan in left_out} == {*inside}
        return Policy.load(folder)

    return get


CASES = [case for case in product(CAMERAS, DIALECTS, ALL_METHODS) if case[-1] != "random"]


@pytest.mark.parametrize(("name", "dialect", "method"), slow_except(FAST, CASES))
def test_every_method_equals_its_reference_with_masked_tokens(
    name: str, dialect: str, method: str, with_methods: Policies, reference: References, photo: Image.Image
) -> None:
    own, model = with_methods(name, dialect, fast=(name, dialect, method) in FAST), reference(name)
    seen = frames(photo, CAMERAS[name])
    towers = tower_outputs(own, seen)
    text = model.tokenizer.encode(INSTRUCTION.lower(), add_special_tokens=False)
    question = model.tensors["language_model.model.embed_tokens.weight"][text.ids].numpy()
    embeddings = [model.projected(torch.from_numpy(tokens)).numpy() for tokens, *_ in towers]

    def asking(hidden: Any, visual: list[int], text: list[int]) -> list[int]:
        # The row that predicts the first number is the last of the text, and not of the prompt.
        return text[-1:] if method in READ_ONE_ROW else asking_rows(method, hidden, visual, text)

    for budget, plan in own.bundle.manifest.plans[method].items():
        assert plan.counts is not None
        count = len(towers[0][0])
        chosen = [(tokens, [*range(count)]) for tokens, *_ in towers]
        if plan.sanitizer is not None:
            chosen = [
                kept_of(method, plan.counts, [*camera], question, embeddings=projected)
                for camera, projected in zip(towers, embeddings, strict=True)
            ]
        stages = dict(zip(map(int, plan.select_after), plan.counts.stages, strict=True))
        options = {"choose": choose_tops} if method == "tops" else {}
        report = own.act(seen, INSTRUCTION, drawn(name), method=method, budget=budget)
        assert_equal(report, model, name, towers, stages, budget=budget, chosen=chosen, asking=asking, **options)
