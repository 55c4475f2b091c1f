"""The steps of the action expert, from noise to a chunk of actions."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.errors import NumericsError
from sinkprune.contract.manifest import PolicyFacts
from sinkprune.contract.precision import Array
from sinkprune.runtime.acting.observation import Observation
from sinkprune.runtime.acting.step_times import StepTimes
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.decoding import Prefill


def denoise(
    chain: Chain,
    policy: PolicyFacts,
    times: StepTimes,
    observation: Observation,
    prefix: Prefill,
    position: int,
    clock: Stopwatch,
) -> Array:
    """Return the expert's actions [1,chunk,action_dim] fp32, over the caches of `prefix`.

    The expert's rows continue at `position`. Time runs from 1 (noise) to 0 in equal steps, by Euler's method, as in
    transformers' `PI0ForConditionalGeneration.sample_actions`. The caches do not move between steps. Raises
    `NumericsError` for actions that are not finite.
    """
    backend, rows = chain.backend, policy.expert_rows
    cos, sin = (backend.tensor(table) for table in chain.rotary.tables(np.arange(position, position + rows)))
    step = np.float32(-1.0 / observation.steps)
    fixed = {
        "cos": cos,
        "sin": sin,
        "step": backend.tensor(np.array([step])),
    }
    if not policy.state_in_prompt:
        fixed["state"] = backend.tensor(observation.state)
    for segment, (decoder, cache) in enumerate(zip(chain.decoders, prefix.cache.segments, strict=True)):
        fixed[f"length_{segment}"] = backend.tensor(np.array([cache.length], np.int64))
        fixed |= decoder.keys_and_values(cache)
    actions = backend.tensor(observation.noise)
    for number, time in enumerate(times.inputs(observation.steps)):
        with clock.measure(f"step_{number}"):
            actions = chain.last({**fixed, **time, "actions": actions})["actions_out"]
    found = backend.numpy(actions)
    if not np.isfinite(found).all():
        raise NumericsError(
            "the action expert gave actions that are not finite. If the bundle is fp16, its values may exceed that "
            "type: export it with --precision fp32. If not, the checkpoint's weights are damaged."
        )
    return found
