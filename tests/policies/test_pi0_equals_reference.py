"""pi0 against transformers, and pi0.5 against a plain reference: chunks, also with dropped tokens masked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Policy
from sinkprune.contract.budgets import parse_budget
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import LanguageModel
from sinkprune.contract.policy_facts import PolicyFacts
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import Backend, Engine
from sinkprune.runtime.families.policies import state_prompt
from support.models.small_models import PI0_SHAPES, PI05_SHAPES
from support.references.pi0 import INSTRUCTION, Pi0Reference, frames, masked_chunk, masked_prefix, sanitized_rows
from support.references.pi05 import Pi05Reference, state_text
from support.references.reference import one_stage
from support.references.steps import tower_output

Bundles = Callable[..., Path]
Policies = Callable[..., Policy]
References = Callable[[str], Any]

Array = np.ndarray[Any, Any]
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
PI05_BUDGETS = (*BUDGETS[:2], *BUDGETS[-2:])
SHAPES = {**PI0_SHAPES, **PI05_SHAPES}


@pytest.fixture(scope="module")
def reference(checkpoint: Callable[[str], Path]) -> References:
    """A small checkpoint in transformers, with an expert in numpy for pi0.5."""
    return cache(lambda name: (Pi05Reference if name in PI05_SHAPES else Pi0Reference)(checkpoint(name)))


@pytest.fixture(scope="module")
def policy(bundle: Bundles) -> Policies:
    """A loaded small policy of three cameras, or as many."""

    @cache
    def get(name: str, cameras: int = 3, dialect: str = "opset24") -> Policy:
        budgets = PI05_BUDGETS if name in PI05_SHAPES else BUDGETS
        return Policy.load(bundle(name, budgets=budgets, max_images=cameras, dialect=dialect))

    return get


def drawn(policy: Policy) -> tuple[Array, Array]:
    """A state, of which some numbers lie outside the ranges of the training, and noise."""
    facts, random = policy.facts, np.random.default_rng(0)
    state = random.uniform(-2, 2, len(facts.usual_state)).astype(np.float32)
    return state, random.standard_normal((facts.chunk, facts.action_dim)).astype(np.float32)


def normalised(policy: Policy, state: Array) -> Array:
    facts = policy.facts
    if facts.state_range is not None:
        low, high = np.array(facts.state_range.low, np.float32), np.array(facts.state_range.high, np.float32)
        return 2 * (state - low) / (high - low) - 1
    return (state - np.array(facts.state_mean or 0.0)) / np.array(facts.state_std or 1.0)


def padded(policy: Policy, state: Array) -> Array:
    """PI0Processor's state [1,1,state_dim]."""
    found = np.zeros((1, 1, policy.facts.state_dim), np.float32)
    found[0, 0, : len(state)] = normalised(policy, state)
    return found


def in_robots_units(policy: Policy, actions: Array) -> Array:
    """What the checkpoint's statistics make of the expert's actions."""
    facts = policy.facts
    if facts.action_range is not None:
        low, high = np.array(facts.action_range.low), np.array(facts.action_range.high)
        return (actions[:, : len(low)] + 1) / 2 * (high - low) + low
    width = len(facts.action_mean) or facts.action_dim
    return actions[:, :width] * np.array(facts.action_std or 1.0) + np.array(facts.action_mean or 0.0)


@pytest.mark.parametrize(
    ("name", "missing"),
    [*((name, missing) for name in SHAPES for missing in (None, 1)), *((name, 0) for name in PI0_SHAPES)],
)
def test_unpruned_chunks_equal_the_reference(
    name: str, missing: int | None, policy: Policies, reference: References, photo: Image.Image
) -> None:
    own, torch_model = policy(name), reference(name)
    seen = [None if number == missing else frame for number, frame in enumerate(frames(photo))]
    there = [frame for frame in seen if frame is not None]
    state, noise = drawn(own)
    report = own.act(seen, INSTRUCTION, state, noise=noise, steps=STEPS)
    if name in PI05_SHAPES:
        torch_model.text = state_text(INSTRUCTION, normalised(own, state))
        caches = torch_model.prefix_cache(there)
        rows = caches[0][0].shape[2]
        expected = torch_model.chunk(caches, [np.ones(rows, bool)] * len(caches), rows, noise, STEPS)
    else:
        expected = torch_model.unpruned(seen, padded(own, state), noise[None], STEPS)
    assert np.abs(expected).max() > 0.5
    assert np.abs(expected - noise).max() > 0.5
    np.testing.assert_allclose(report.actions, in_robots_units(own, expected), atol=1e-3)
    assert report.prompt_tokens == len(torch_model.ids(0))
    assert report.steps == len(report.step_ms) == STEPS
    assert report.visual_tokens == own.bundle.manifest.most_visual_tokens * len(there)


@pytest.mark.parametrize("name", SHAPES)
def test_the_tower_is_that_of_transformers(
    name: str, policy: Policies, reference: References, photo: Image.Image
) -> None:
    """Norms are of the rows before the last norm layer, salience is what patches receive in the block before last."""
    seen, torch_model = frames(photo, 3), reference(name)
    expected = torch_model.tower(seen)
    for own, theirs in zip(tower_outputs(policy(name), seen), expected, strict=True):
        for mine, other in zip(own, theirs, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-3 * np.abs(other).max())
    inputs = [policy(name)._model.family.inputs(frame)["pixel_values"][0] for frame in seen]
    np.testing.assert_allclose(inputs, torch_model.pixels(seen).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "budget", "cameras", "dialect"),
    [
        *(("pi0", budget, cameras, "opset24") for budget in BUDGETS for cameras in (1, 3)),
        *((name, "prune-77.8", 3, "opset24") for name in PI0_SHAPES if name != "pi0"),
        *((name, budget, 3, "opset24") for name in PI05_SHAPES for budget in PI05_BUDGETS),
        ("pi0", "prune-88.9", 3, "opset20"),
        ("pi0.5", "prune-77.8", 3, "opset20"),
    ],
)
def test_pruned_chunks_equal_the_reference_with_masked_tokens(
    name: str, budget: str, cameras: int, dialect: str, policy: Policies, reference: References, photo: Image.Image
) -> None:
    """And kept tokens equal those that the reference chooses from the policy's own towers."""
    own, torch_model, seen = policy(name, cameras, dialect), reference(name), frames(photo, cameras)
    state, noise = drawn(own)
    report = own.act(seen, INSTRUCTION, state, noise=noise, steps=STEPS, budget=budget)
    if name in PI05_SHAPES:
        torch_model.text = state_text(INSTRUCTION, normalised(own, state))
    towers = tower_outputs(own, seen)
    prefix, sources = sanitized_rows(torch_model, towers, budget)
    count = len(towers[0][0])
    stage = one_stage(parse_budget("pi0", budget), count, SHAPES[name].num_layers)
    masked = masked_prefix(torch_model, prefix, budget, {cut: [kept] * cameras for cut, kept in stage.items()})
    position = cameras * count + len(prefix.text)
    if name in PI05_SHAPES:
        caches = [(layer.keys.numpy(), layer.values.numpy()) for layer in masked.cache.layers]
        expected = torch_model.chunk(caches, [one.numpy() for one in masked.visible], position, noise, STEPS)
    else:
        expected = masked_chunk(torch_model, masked, position, padded(own, state), noise[None], STEPS)
    assert [kept.index.ravel().tolist() for kept in report.images] == sources
    for cut, rows in masked.survivors.items():
        left = [[camera.index(row) for row in rows if row in camera] for camera in prefix.cameras]
        assert [kept.after_stage[cut].tolist() for kept in report.images] == left
    assert report.tokens_per_layer == [int(one.sum()) - len(prefix.text) for one in masked.visible]
    assert report.tokens_per_layer[-1] < report.visual_tokens
    np.testing.assert_allclose(report.actions, in_robots_units(own, expected), atol=1e-3)


def tower_outputs(policy: Policy, seen: list[Image.Image]) -> list[tuple[Array, ...]]:
    """Tokens, norms and salience of each camera, as the policy's tower rounds them: some tokens are nearly alike."""
    return [tuple(array[0].copy() for array in tower_output(policy._model, frame)) for frame in seen]


def test_held_actions_have_the_time_0_of_their_training(
    checkpoint: Callable[[str], Path], policy: Policies, reference: References, photo: Image.Image, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint("pi0.5"), tmp_path / "trained")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rtc_training_max_delay": 3}))
    export_bundle(ExportRequest(str(source), budgets=PI05_BUDGETS, max_images=3), tmp_path / "bundle")
    trained, plain = Policy.load(tmp_path / "bundle"), policy("pi0.5")
    torch_model, seen = reference("pi0.5"), frames(photo)
    graphs = [
        {name: each.bundle.manifest.files[spec.file].sha256 for name, spec in each.bundle.manifest.graphs.items()}
        for each in (trained, plain)
    ]
    assert {name for name in graphs[0] if graphs[0][name] != graphs[1].get(name)} == {"expert"}
    state, noise = drawn(trained)
    torch_model.text = state_text(INSTRUCTION, normalised(trained, state))
    caches = torch_model.prefix_cache(seen)
    rows = caches[0][0].shape[2]
    given = [np.ones(rows, bool)] * len(caches), rows, noise, STEPS
    width = trained.facts.action_width
    held = np.random.default_rng(3).standard_normal((3, noise.shape[1]))
    held[:, width:] = 0
    for count in (0, 2, 3):
        expected = in_robots_units(trained, torch_model.chunk(caches, *given, held[:count]))
        own = in_robots_units(trained, held[:count])
        found = trained.act(seen, INSTRUCTION, state, noise=noise, steps=STEPS, held=own).actions
        np.testing.assert_allclose(found, expected, atol=1e-3)
    inpainted = plain.act(seen, INSTRUCTION, state, noise=noise, steps=STEPS, held=own).actions
    assert np.abs(inpainted - expected).max() > 1e-2
    with pytest.raises(UsageError, match="4 actions are held, expected 3 at most, as in the training"):
        trained.act(seen, INSTRUCTION, state, held=np.zeros((4, width)))


def facts(width: int) -> PolicyFacts:
    model = LanguageModel(32, 64, 1, 1, 1, 16, 320, 512, 1e4)
    return PolicyFacts(model, 1, 32, 4, 1, 4e-3, 4.0, (0.0,) * width, (1.0,) * width, (), (), state_in_prompt=True)


@given(
    st.lists(
        st.floats(-3, 3, width=32) | st.sampled_from([-1.0, 1.0, 0.0, -0.0, -1 + 2**-7, 1e30]), min_size=1, max_size=8
    )
)
def test_the_state_is_written_in_bins(numbers: list[float]) -> None:
    state = np.zeros((1, 1, 32), np.float32)
    state[0, 0, : len(numbers)] = numbers
    assert state_prompt(facts(len(numbers)), "go", state) == state_text("go", numbers)


def test_an_instruction_is_cleaned_as_openpi_cleans_it() -> None:
    text = state_prompt(facts(2), " pick_up\nthe cup ", np.array([[[0.5, -1.5]]], np.float32))
    assert text == "Task: pick up the cup, State: 192 -1;\nAction: "


def test_each_time_is_computed_once_and_a_deadline_waits_for_none(bundle: Bundles, photo: Image.Image) -> None:
    calls = list[str]()

    def wrap(graph: str, engine: Engine, backend: Backend) -> Any:
        def counting(inputs: Any) -> Any:
            calls.append(graph)
            return engine(inputs)

        return counting if graph in ("modulation", "expert") else engine

    policy = Policy.load(bundle("pi0.5", budgets=PI05_BUDGETS, max_images=3), wrap=wrap)
    act = partial(policy.act, [photo, None, None], "go", policy.facts.usual_state, seed=1)
    first = act(steps=4)
    assert (calls.count("modulation"), calls.count("expert")) == (4, 4)
    # Four of eight steps have the same times.
    for steps, computed in ((4, 4), (8, 8), (2, 8), (8, 8)):
        act(steps=steps, budget=PI05_BUDGETS[0] if steps == 2 else "none")
        assert calls.count("modulation") == computed
    # A deadline may choose any number of steps up to the checkpoint's.
    policy.load_plans("sinkpruner")
    most = policy.facts.steps
    fractions = {Fraction(number, steps) for steps in range(1, most + 1) for number in range(steps)}
    assert calls.count("modulation") == len(fractions) > most
    # A chunk has as many steps as it likes, more than are remembered too.
    act(steps=101)
    np.testing.assert_array_equal(first.actions, act(steps=4).actions)
