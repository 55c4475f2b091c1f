"""Chunks of actions on every CPU backend, and with rounded weights and types."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Policy
from sinkprune.policies.report import ActionReport
from support.models.small_models import PI0_SHAPES
from support.programs.slow_cases import slow_except
from support.references.pi0 import INSTRUCTION, frames
from support.references.same_answers import kept_sets
from support.stand_ins.processor_features import assert_error, computes_in_bf16, rounds_to_int8

Policies = Callable[..., Policy]

Array = np.ndarray[Any, Any]
BUDGETS = ("prune-77.8", "prune-88.9+raster+visual-keys")
WIDE = "pi0-bare"
"""Has only widths that 4-bit weights take."""


@pytest.fixture(scope="module")
def policy(bundle: Callable[..., Path]) -> Policies:
    """A loaded small policy of three cameras, or of one if it has one picture's prompt."""

    @cache
    def get(name: str, precision: str = "fp32", weights: str | None = None, **options: Any) -> Policy:
        cameras = 1 if name == "openvla" else 3
        return Policy.load(bundle(name, precision, BUDGETS, max_images=cameras, weights=weights), **options)

    return get


def act(policy: Policy, photo: Image.Image, **options: Any) -> tuple[ActionReport, Array]:
    """A chunk from all cameras, a drawn state and drawn noise, and the expert's actions [chunk,action_dim]."""
    facts, random = policy.facts, np.random.default_rng(0)
    state = random.uniform(-2, 2, len(facts.usual_state))
    given = {"cameras": frames(photo, policy.bundle.manifest.max_images), **options}
    if facts.expert:
        given["noise"] = random.standard_normal((facts.chunk, facts.action_dim), np.float32)
    report = policy.act(instruction=INSTRUCTION, state=state, **given)
    # The statistics scale what is compared.
    scale, mean = np.array(facts.action_std or 1.0), np.array(facts.action_mean or 0.0)
    return report, (report.actions - mean) / scale


def error(found: Array, expected: Array) -> float:
    """The difference, over the length of the expected chunk."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("backend", ["openvino", "ort-cpu+openvino", "ort-cpu+openvino-prefill"])
@pytest.mark.parametrize("name", [*slow_except({"pi0", "pi0-deep"}, PI0_SHAPES), "openvla-oft", "openvla"])
def test_in_fp32_every_backend_keeps_and_does_the_same(
    name: str, backend: str, policy: Policies, photo: Image.Image
) -> None:
    ours, theirs = policy(name, backend=backend, compute="fp32"), policy(name)
    cameras = frames(photo, theirs.bundle.manifest.max_images)
    given = [{"cameras": cameras, "budget": budget} for budget in ("none", *BUDGETS)]
    if name in PI0_SHAPES:
        given.append({"cameras": [cameras[0], None, cameras[2]]})
    for options in given:
        (report, actions), (expected, others) = (act(one, photo, **options) for one in (ours, theirs))
        assert report.tokens_per_layer == expected.tokens_per_layer
        assert kept_sets(report) == kept_sets(expected)
        np.testing.assert_allclose(actions, others, atol=1e-4)


@pytest.mark.parametrize("name", ["pi0", WIDE])
def test_16_bits_round_the_chunk_a_little(name: str, policy: Policies, photo: Image.Image) -> None:
    """With the time embedded in bf16, the velocity would be wrong by half."""
    (_, exact), (_, fp16), (_, bf16) = (
        act(one, photo) for one in (policy(name), policy(name, "fp16"), policy(name, backend="openvino"))
    )
    # Rounding errors of a type of 11 bits, which add up over layers and steps.
    assert 0 < error(fp16, exact) < 8 * 2**-11
    assert_error(error(bf16, exact), rounded=computes_in_bf16(), least=1e-4, most=5 * 2**-8, exact=1e-5)


@pytest.mark.parametrize(
    ("weights", "backend"),
    slow_except(
        {("int8", "ort-cpu"), ("int8", "openvino"), ("int4", "ort-cpu+openvino")},
        product(("int8", "int4"), ("ort-cpu", "openvino", "ort-cpu+openvino")),
    ),
)
def test_rounded_weights_and_the_fastest_types_change_the_chunk_a_little(
    weights: str, backend: str, policy: Policies, photo: Image.Image
) -> None:
    fast, exact = (policy(WIDE, weights=weights, backend=backend, compute=how) for how in ("fastest", "fp32"))
    (_, found), (_, expected), (_, unrounded) = (act(one, photo) for one in (fast, exact, policy(WIDE)))
    # Weights that are mixed up give an error above 1.
    assert 1e-3 < error(expected, unrounded) < (0.05 if weights == "int8" else 0.6)
    rounded = True if backend != "openvino" else rounds_to_int8() or computes_in_bf16()
    # Rows are rounded to 8 bits in front of each matrix.
    assert_error(error(found, expected), rounded=rounded, least=1e-4, most=16 * 2**-8, exact=1e-4)
