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

from sinkprune import Policy
from sinkprune.contract.budgets import parse_budget
from sinkprune.export.bundle_writer import Unreachable, export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.source import ExportRequest
from support.models.small_models import OPENVLA_SHAPES, OPENVLA_TOKEN_SHAPES
from support.programs.slow_cases import slow_except
from support.references.kept_tokens import choose_tops, kept_of
from support.references.openvla import INSTRUCTION, OpenVlaReference
from support.references.pi0 import frames
from support.references.reference import one_stage
from support.references.reference_methods import IN_LLM, asking_rows
from support.references.steps import Watched

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
    return np.random.default_rng(1).uniform(-2.5, 2.5, OPENVLA_SHAPES[name].state_dim).tolist()


def expected(
    reference: OpenVlaReference, name: str, seen: list[Image.Image], budget: str | None = None
) -> tuple[Array, Any, Any]:
    """A chunk in the robot's units, its prompt and the run of its layers."""
    shape = OPENVLA_SHAPES[name]
    (data_set,) = shape.data_sets
    state = reference.normalised_state(drawn(name), data_set, ENDS) if shape.state_dim else None
    towers = reference.towers(seen)
    rows = reference.rows(towers, INSTRUCTION, state, shape.chunk * shape.action_dim, budget)
    stages = None
    if budget is not None:
        stage = one_stage(parse_budget("openvla-oft", budget), len(towers[0][0]), shape.num_layers)
        stages = {cut: [kept] * len(seen) for cut, kept in stage.items()}
    run = reference.run(rows, budget, stages)
    actions = reference.actions(run.hidden, shape.chunk, shape.action_dim)
    assert np.abs(actions).max() > 1, "clipped actions would pass"
    return reference.in_robots_units(actions, data_set, ENDS), rows, run


@pytest.mark.parametrize(("name", "cameras"), [*((name, 2) for name in OPENVLA_SHAPES), ("openvla-oft", 1)])
def test_unpruned_chunks_equal_the_reference(
    name: str, cameras: int, policy: Policies, reference: References, photo: Image.Image
) -> None:
    own, seen = policy(name, cameras), frames(photo, cameras)
    report = own.act(seen, INSTRUCTION, drawn(name))
    actions, rows, _ = expected(reference(name), name, seen)
    np.testing.assert_allclose(report.actions, actions, atol=1e-3)
    assert report.prompt_tokens == len(rows.values) - report.visual_tokens
    assert (report.steps, len(report.step_ms), report.in_robots_units) == (1, 1, True)


@pytest.mark.parametrize(
    ("name", "budget", "dialect"),
    [
        *(("openvla-oft", budget, "opset24") for budget in BUDGETS),
        ("openvla-oft", "prune-77.8", "opset20"),
        ("openvla-oft-bridge", "prune-66.7", "opset24"),
        ("openvla-oft-stateless", "prune-88.9+raster+visual-keys", "opset24"),
    ],
)
def test_pruned_chunks_equal_the_reference_with_masked_tokens(
    name: str, budget: str, dialect: str, policy: Policies, reference: References, photo: Image.Image
) -> None:
    own, seen, steps = policy(name, 2, dialect), frames(photo, 2), Watched()
    report = own.act(seen, INSTRUCTION, drawn(name), budget=budget, observer=steps)
    actions, rows, run = expected(reference(name), name, seen, budget)
    assert [kept.index.ravel().tolist() for kept in report.images] == rows.sources
    for cut, left in run.survivors.items():
        cameras = [[camera.index(row) for row in left if row in camera] for camera in rows.cameras]
        assert [kept.after_stage[cut].tolist() for kept in report.images] == cameras
    text = len(rows.values) - sum(map(len, rows.cameras))
    assert report.tokens_per_layer == [int(seen_rows.sum()) - text for seen_rows in run.visible]
    assert report.tokens_per_layer[-1] < report.visual_tokens
    np.testing.assert_allclose(report.actions, actions, atol=1e-3)


@pytest.mark.parametrize("budget", [None, "prune-66.7", "prune-88.9+raster+visual-keys"])
@pytest.mark.parametrize("name", OPENVLA_TOKEN_SHAPES)
def test_actions_of_tokens_equal_the_reference(
    name: str, budget: str | None, policy: Policies, reference: References, photo: Image.Image
) -> None:
    own, torch_model, shape = policy(name, 1), reference(name), OPENVLA_TOKEN_SHAPES[name]
    seen, (data_set,) = frames(photo, 1), shape.data_sets
    towers = torch_model.towers(seen)
    rows = torch_model.rows(towers, INSTRUCTION, None, 0, budget)
    stages = None
    if budget is not None:
        stage = one_stage(parse_budget("openvla", budget), len(towers[0][0]), shape.num_layers)
        stages = {cut: [kept] for cut, kept in stage.items()}
    tokens, actions = torch_model.token_actions(rows, shape.action_dim, torch_model.run(rows, budget, stages))
    report = own.act(seen, INSTRUCTION, budget=budget or "none")
    assert len(set(tokens)) > 2 and all(31744 <= token < 32000 for token in tokens)
    np.testing.assert_allclose(report.actions, torch_model.in_robots_units(actions, data_set, ENDS), atol=1e-6)
    assert report.prompt_tokens == len(rows.values) - sum(map(len, rows.cameras))


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


def tower_outputs(policy: Policy, seen: list[Image.Image]) -> list[tuple[Any, Any, Any]]:
    """Tokens, norms and salience of each camera, as the policy's tower rounds them: some tokens are nearly alike."""
    chain, found = policy._model.chain, []
    for frame in seen:
        given = policy._model.family.inputs(frame)
        outputs = chain.vision({name: chain.backend.tensor(value) for name, value in given.items()})
        tokens, *others = (chain.backend.numpy(outputs[name])[0].copy() for name in ("tokens", "norms", "salience"))
        found.append((tokens, *others))
    return found


CASES = [case for case in product(CAMERAS, DIALECTS, ALL_METHODS) if case[-1] != "random"]


@pytest.mark.parametrize(("name", "dialect", "method"), slow_except(FAST, CASES))
def test_every_method_equals_its_reference_with_masked_tokens(
    name: str,
    dialect: str,
    method: str,
    with_methods: Policies,
    reference: Callable[[str], OpenVlaReference],
    photo: Image.Image,
) -> None:
    own, torch_model = with_methods(name, dialect, fast=(name, dialect, method) in FAST), reference(name)
    seen, shape = frames(photo, CAMERAS[name]), {**OPENVLA_SHAPES, **OPENVLA_TOKEN_SHAPES}[name]
    towers, (data_set,) = tower_outputs(own, seen), shape.data_sets
    ends, text = ("q01", "q99"), torch_model.tokenizer.encode(INSTRUCTION.lower(), add_special_tokens=False)
    question = torch_model.tensors["language_model.model.embed_tokens.weight"][text.ids].numpy()
    state = own.facts.usual_state if shape.state_dim else None
    placeholders = shape.chunk * shape.action_dim if shape.head else 0

    def asking(hidden: Any, visual: list[int], text: list[int]) -> list[int]:
        # The row that predicts the first number is the last of the text, and not of the prompt.
        return text[-1:] if method in READ_ONE_ROW else asking_rows(method, hidden, visual, text)

    for budget, plan in own.bundle.manifest.plans[method].items():
        chosen = None
        if plan.sanitizer is not None:
            assert plan.counts is not None
            chosen = [
                kept_of(
                    method,
                    plan.counts,
                    [*camera],
                    question,
                    embeddings=torch_model.projected(torch.from_numpy(camera[0])).numpy(),
                )
                for camera in towers
            ]
        given = torch_model.normalised_state(state, data_set, ends) if state else None
        rows = torch_model.rows(towers, INSTRUCTION, given, placeholders, chosen=chosen)
        assert plan.counts is not None
        stages = {
            int(cut): [most] * len(seen) for cut, most in zip(plan.select_after, plan.counts.stages, strict=True)
        }
        choose = {"choose": choose_tops} if method == "tops" else {}
        run = torch_model.run(rows, budget, stages, asking, **choose)
        if shape.head:
            actions = torch_model.actions(run.hidden, shape.chunk, shape.action_dim)
        else:
            _, actions = torch_model.token_actions(rows, shape.action_dim, run)
        report = own.act(seen, INSTRUCTION, state or (), method=method, budget=budget)
        assert [kept.index.ravel().tolist() for kept in report.images] == rows.sources, budget
        for cut, left in run.survivors.items():
            cameras = [[camera.index(row) for row in left if row in camera] for camera in rows.cameras]
            assert [kept.after_stage[cut].tolist() for kept in report.images] == cameras, budget
        np.testing.assert_allclose(report.actions, torch_model.in_robots_units(actions, data_set, ends), atol=1e-3)
