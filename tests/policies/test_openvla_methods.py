"""Every method on OpenVLA-OFT and OpenVLA: what is kept is its reference's, and actions equal masking."""

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
from sinkprune.export.bundle_writer import Unreachable, export_bundle
from sinkprune.export.dialects import DIALECTS
from sinkprune.export.methods import METHODS as ALL_METHODS
from sinkprune.export.source import ExportRequest
from support.models.chosen_heads import WITH_HEADS, every_method, heads_by_layer
from support.models.small_models import OPENVLA_SHAPES, OPENVLA_TOKEN_SHAPES
from support.programs.slow_cases import slow_except
from support.references.kept_tokens import choose_tops, kept_of
from support.references.openvla import INSTRUCTION, OpenVlaReference
from support.references.pi0 import frames
from support.references.reference_methods import IN_LLM, asking_rows

BUDGETS = ("prune-66.7", "prune-77.8", "prune-80", "prune-88.9")
CAMERAS = {"openvla-oft": 2, "openvla": 1}
FAST = {("openvla-oft", "opset24", "vscan")}
READ_ONE_ROW = ("fastv", "vscan")


@pytest.fixture(scope="module")
def policy(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Policy]:
    """A policy with those of `FAST`, or with every method at every budget."""

    @cache
    def get(name: str, dialect: str, *, fast: bool) -> Policy:
        source, left_out = checkpoint(name), list[Unreachable]()
        options = {**every_method(source), "max_images": CAMERAS[name], "dialect": dialect}
        if fast:
            options |= {"heads": None, "budgets": BUDGETS[:1], "methods": tuple(method for *_, method in FAST)}
        folder = tmp_path_factory.mktemp("methods") / name
        export_bundle(ExportRequest(str(source), **options), folder, left_out=left_out.append)
        # Their first layers run on all tokens.
        inside = () if fast else product((*IN_LLM, "sinkpruner-no-sanitizer"), BUDGETS[1:])
        assert {(plan.method, plan.budget) for plan in left_out} == {*inside}
        return Policy.load(folder)

    return get


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], OpenVlaReference]:
    return cache(lambda name: OpenVlaReference(checkpoint(name)))


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
    policy: Callable[..., Policy],
    reference: Callable[[str], OpenVlaReference],
    photo: Image.Image,
) -> None:
    own, torch_model = policy(name, dialect, fast=(name, dialect, method) in FAST), reference(name)
    seen, shape = frames(photo, CAMERAS[name]), {**OPENVLA_SHAPES, **OPENVLA_TOKEN_SHAPES}[name]
    towers, (data_set,) = tower_outputs(own, seen), shape.data_sets
    ends, text = ("q01", "q99"), torch_model.tokenizer.encode(INSTRUCTION.lower(), add_special_tokens=False)
    question = torch_model.tensors["language_model.model.embed_tokens.weight"][text.ids].numpy()
    state = own.facts.usual_state if shape.state_dim else None
    placeholders = shape.chunk * shape.action_dim if shape.head else 0
    heads = heads_by_layer(shape.num_layers, shape.num_heads) if method in WITH_HEADS else {}

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
        run = torch_model.run(rows, budget, stages, asking, heads, **choose)
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
