"""Chunks of actions against transformers: unpruned, and with dropped tokens masked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Policy
from sinkprune.contract.budgets import parse_budget
from support.models.small_models import PI0_SHAPES
from support.references.pi0 import INSTRUCTION, Pi0Reference, frames, masked_chunk, masked_prefix, sanitized_rows
from support.references.reference import one_stage
from support.references.steps import Watched

Policies = Callable[..., Policy]
References = Callable[[str], Pi0Reference]

Array = np.ndarray[Any, Any]
Bundles = Callable[..., Path]
STEPS = 10
BUDGETS = (
    "prune-66.7",
    "prune-77.8",
    "prune-88.9",
    "prune-77.8+drop-sink",
    "prune-77.8+keep-outliers",
    "prune-80+no-sanitizer",
    "prune-88.9+raster+visual-keys",
)


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> References:
    """A small checkpoint in transformers."""
    return cache(lambda name: Pi0Reference(checkpoint(name)))


@pytest.fixture(scope="module")
def policy(bundle: Bundles) -> Policies:
    """A loaded small policy of three cameras, or as many."""

    @cache
    def get(name: str, cameras: int = 3, dialect: str = "opset24") -> Policy:
        return Policy.load(bundle(name, budgets=BUDGETS, max_images=cameras, dialect=dialect))

    return get


def drawn(name: str, seed: int = 0) -> tuple[Array, Array]:
    """A state as the expert takes it, and noise."""
    shape, random = PI0_SHAPES[name], np.random.default_rng(seed)
    width = shape.state_dim - (1 if shape.statistics else 0)
    state = random.uniform(-2, 2, width).astype(np.float32)
    return state, random.standard_normal((shape.chunk, shape.action_dim)).astype(np.float32)


def normalised(policy: Policy, state: Array) -> Array:
    """PI0Processor's state [1,1,state_dim]."""
    facts = policy.facts
    padded = np.zeros((1, 1, facts.state_dim), np.float32)
    mean, std = np.array(facts.state_mean or 0.0), np.array(facts.state_std or 1.0)
    padded[0, 0, : len(state)] = (state - mean) / std
    return padded


def in_robots_units(policy: Policy, actions: Array) -> Array:
    """What the checkpoint's statistics make of the expert's actions."""
    facts = policy.facts
    width = len(facts.action_mean) or facts.action_dim
    mean, std = np.array(facts.action_mean or 0.0), np.array(facts.action_std or 1.0)
    return actions[:, :width] * std + mean


@pytest.mark.parametrize("missing", [None, 0, 1])
@pytest.mark.parametrize("name", PI0_SHAPES)
def test_unpruned_chunks_equal_transformers(
    name: str, missing: int | None, policy: Policies, reference: References, photo: Image.Image
) -> None:
    own, seen = policy(name), [*frames(photo, 3)]
    given = [None if number == missing else frame for number, frame in enumerate(seen)]
    state, noise = drawn(name)
    report = own.act(given, INSTRUCTION, state, noise=noise, steps=STEPS)
    expected = reference(name).unpruned(given, normalised(own, state), noise[None], STEPS)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(report.actions, in_robots_units(own, expected), atol=1e-3)
    assert report.steps == len(report.step_ms) == STEPS
    assert report.visual_tokens == own.bundle.manifest.most_visual_tokens * (3 if missing is None else 2)


@pytest.mark.parametrize("name", PI0_SHAPES)
def test_the_tower_is_that_of_transformers(
    name: str, policy: Policies, reference: References, photo: Image.Image
) -> None:
    """Norms are of the rows before the last norm layer, salience is what patches receive in the block before last."""
    seen, torch_model = frames(photo, 3), reference(name)
    expected = torch_model.tower(seen)
    for own, theirs in zip(tower_outputs(policy(name), torch_model, seen), expected, strict=True):
        for mine, other in zip(own, theirs, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-3 * np.abs(other).max())
    inputs = [policy(name)._model.family.inputs(frame)["pixel_values"][0] for frame in seen]
    np.testing.assert_allclose(inputs, torch_model.pixels(seen).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "budget", "cameras", "dialect"),
    [
        *(("pi0", budget, cameras, "opset24") for budget in BUDGETS for cameras in (1, 3)),
        *((name, "prune-77.8", 3, "opset24") for name in PI0_SHAPES if name != "pi0"),
        ("pi0", "prune-88.9", 3, "opset20"),
    ],
)
def test_pruned_chunks_equal_transformers_with_masked_tokens(
    name: str,
    budget: str,
    cameras: int,
    dialect: str,
    policy: Policies,
    reference: References,
    photo: Image.Image,
) -> None:
    """That a chunk, its kept tokens and its prefix are those of transformers with dropped tokens masked."""
    own, torch_model, seen = policy(name, cameras, dialect), reference(name), frames(photo, cameras)
    (state, noise), steps = drawn(name), Watched()
    report = own.act(seen, INSTRUCTION, state, noise=noise, steps=STEPS, budget=budget, observer=steps)
    towers = tower_outputs(own, torch_model, seen)
    prefix, sources = sanitized_rows(torch_model, towers, budget)
    options, count = parse_budget("pi0", budget), len(towers[0][0])
    stage = one_stage(options, count, PI0_SHAPES[name].num_layers)
    stages = {cut: [kept] * len(seen) for cut, kept in stage.items()}
    masked = masked_prefix(torch_model, prefix, budget, stages)
    position = len(seen) * count + len(prefix.text)
    expected = masked_chunk(torch_model, masked, position, normalised(own, state), noise[None], STEPS)

    assert [kept.index.ravel().tolist() for kept in report.images] == sources
    for cut, rows in masked.survivors.items():
        left = [[camera.index(row) for row in rows if row in camera] for camera in prefix.cameras]
        assert [kept.after_stage[cut].tolist() for kept in report.images] == left
    visual = [int(seen_rows.sum()) - len(prefix.text) for seen_rows in masked.visible]
    assert report.tokens_per_layer == visual
    np.testing.assert_allclose(report.actions, in_robots_units(own, expected), atol=1e-3)


def tower_outputs(
    policy: Policy, reference: Pi0Reference, seen: list[Image.Image]
) -> list[tuple[Array, Array, Array]]:
    """Tokens, norms and salience of each camera, as the policy's tower gives them."""
    chain = policy._model.chain
    pixels = reference.pixels(seen).numpy().astype(np.float32)
    outputs = chain.vision({"pixel_values": chain.backend.tensor(pixels)})
    tokens, norms, salience = (chain.backend.numpy(outputs[name]) for name in ("tokens", "norms", "salience"))
    return [*zip(tokens, norms, salience, strict=True)]
