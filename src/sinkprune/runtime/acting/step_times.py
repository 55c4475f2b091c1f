"""What the action expert reads of the time of each denoising step."""

from __future__ import annotations

import numpy as np

from sinkprune.contract.manifest import MODULATION, PolicyFacts
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import Tensor
from sinkprune.runtime.steps.chain import Chain

_MOST = 100
"""How many times are remembered, of about half a megabyte each for pi0.5's true shapes."""


class StepTimes:
    """The inputs of the expert that depend on the time of a step alone.

    The scales, shifts and gates of pi0.5's norms are such inputs: a quarter of the weights of a step. They are
    computed at the first use of a time, and remembered. Threads may share an instance.
    """

    def __init__(self, chain: Chain, policy: PolicyFacts) -> None:
        """Compute with the engines of `chain`."""
        self._chain, self._policy = chain, policy
        self._known: dict[float, Tensor] = {}

    def inputs(self, steps: int) -> list[dict[str, Tensor]]:
        """Return the inputs of each of `steps` equal steps, from time 1 (noise) to 0; called in a `turn`."""
        times = 1.0 - np.arange(steps) / steps
        embedded = time_embeddings(self._policy, times)
        return [self._of(float(time), row[None, None]) for time, row in zip(times, embedded, strict=True)]

    def load(self, most: int) -> None:
        """Compute the inputs of any number of steps up to `most`, as far as they are remembered; in a `turn`."""
        for steps in range(most, 0, -1):
            if len(self._known) + steps <= _MOST:
                self.inputs(steps)

    def _of(self, time: float, embedded: Array) -> dict[str, Tensor]:
        backend, engine = self._chain.backend, self._chain.modulation
        if engine is None:
            return {"time_embedding": backend.tensor(embedded)}
        found = self._known.get(time)
        if found is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            made = engine({"time_embedding": backend.tensor(embedded)})[MODULATION]
            # A copy: a backend may reuse the memory of an engine's outputs.
            self._known[time] = found = backend.tensor(np.array(backend.numpy(made)))
        return {MODULATION: found}


def time_embeddings(policy: PolicyFacts, times: Array) -> Array:
    """Return [steps,d] fp32: the sines and cosines of `times` [steps] at the expert's frequencies, in radians.

    In fp64, of times in fp32, as LeRobot and openpi's PyTorch code compute them; transformers' fp32 differs by up to
    2e-4. They are no part of the graph: angles reach 1600 radians, and libraries that compute in bf16 or fp16 round
    them by several radians.
    """
    share = np.linspace(0.0, 1.0, policy.expert.hidden_size // 2)
    periods = policy.min_period * (policy.max_period / policy.min_period) ** share
    angles = times.astype(np.float32).astype(np.float64)[:, None] * (2 * np.pi / periods)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
