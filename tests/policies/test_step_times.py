"""What pi0.5's expert reads of the time: against plain numpy, once for each time."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Policy
from sinkprune.policies import chunk as step_times
from sinkprune.runtime.backends import Backend, Engine
from support.models.pi0_checkpoints import EXPERT
from support.references.pi05 import Pi05Reference, silu, time_embedding

BUDGET = "prune-77.8"


@pytest.fixture(scope="module")
def path(bundle: Callable[..., Path]) -> Path:
    """A small policy of two cameras."""
    return bundle("pi0.5", budgets=(BUDGET,), max_images=2)


def test_scales_shifts_and_gates_equal_the_reference(path: Path, checkpoint: Callable[[str], Path]) -> None:
    """To 1e-6 of the largest, at every step of several numbers of steps."""
    policy, reference = Policy.load(path), Pi05Reference(checkpoint("pi0.5"))
    facts = policy.facts
    layers = [f"layers.{layer}." for layer in range(facts.expert.num_layers)]
    names = [f"{layer}{norm}" for layer in layers for norm in ("input_layernorm", "post_attention_layernorm")]
    for steps in (1, 3, 10):
        found = list(policy._times.inputs(steps))
        assert len(found) == steps
        for number, each in enumerate(found):
            condition = time_embedding(1 - number / steps, facts.expert.hidden_size, 4e-3, 4.0)
            condition = silu(reference.linear("time_mlp_out", silu(reference.linear("time_mlp_in", condition))))
            expected = []
            for name in [*names, "norm"]:
                scale, shift, gate = np.split(reference.linear(f"{EXPERT}{name}.dense", condition), 3)
                expected += [1 + scale, shift, gate]
            assert list(each) == ["modulation"]
            own = policy.backend.numpy(each["modulation"])
            np.testing.assert_allclose(own[0], np.stack(expected), atol=1e-6 * np.abs(expected).max())


def test_each_time_is_computed_once(path: Path, photo: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def wrap(graph: str, engine: Engine, backend: Backend) -> Any:
        def counting(inputs: Any) -> Any:
            calls.append(graph)
            return engine(inputs)

        return counting if graph in ("modulation", "expert") else engine

    policy = Policy.load(path, wrap=wrap)
    act = partial(policy.act, [photo, None], "go", policy.facts.usual_state, seed=1)
    first = act(steps=4)
    assert (calls.count("modulation"), calls.count("expert")) == (4, 4)
    # Four of eight steps have the same times.
    for steps, computed in ((4, 4), (8, 8), (2, 8), (8, 8)):
        again = act(steps=steps, budget=BUDGET if steps == 2 else "none")
        assert calls.count("modulation") == computed and len(again.step_ms) == steps
    np.testing.assert_array_equal(first.actions, act(steps=4).actions)
    # Few are remembered, and a chunk has as many steps as it likes.
    monkeypatch.setattr(step_times, "_MOST", 3)
    act(steps=5)
    assert len(policy._times._known) <= 3
    np.testing.assert_array_equal(first.actions, act(steps=4).actions)


@pytest.mark.parametrize("warm_up", [True, False])
def test_no_chunk_with_a_deadline_waits_for_times(warm_up: bool, path: Path, photo: Image.Image) -> None:
    """Of any number of steps up to the checkpoint's; all in all as many times as there are fractions."""
    policy = Policy.load(path)
    if warm_up:
        policy.warm_up([photo, None], "go", policy.facts.usual_state, budget=BUDGET, seconds=0)
    else:
        policy.load_plans("sinkpruner")
    fractions = {Fraction(number, steps) for steps in range(1, policy.facts.steps + 1) for number in range(steps)}
    assert len(policy._times._known) == len(fractions) > policy.facts.steps
    # No more than are remembered, and none is lost.
    first, count = policy._times._known[1.0], len(fractions)
    policy._times.load(200)
    assert policy._times._known[1.0] is first and count < len(policy._times._known) <= step_times._MOST
