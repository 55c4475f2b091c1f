"""Judges chunks of actions that a little noise changes much, as where a gripper is about to close.

There, correct engines may close it one action sooner than the graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.engines.gate.comparing import chunk_differences, kept_alike
from sinkprune.engines.gate.limits import Rounding, kind_of, limit_of
from sinkprune.engines.gate.question import GateQuestion
from sinkprune.engines.gate.recording import REFERENCE, Recording, act_on_question
from sinkprune.engines.gate.report import ChunkReport
from sinkprune.engines.progress import BuildProgress
from sinkprune.runtime.backends import Backend, Engine, Tensor, load_backend
from sinkprune.runtime.policy import Policy

_RUNS = 8
_ROOM = 2
"""The engines of all graphs add rounding, and the noise is on one graph's outputs."""


def judged_by_noise(
    chunks: Sequence[ChunkReport],
    recording: Recording,
    bundle: Bundle,
    question: GateQuestion,
    rounding: Rounding,
    progress: BuildProgress,
) -> list[ChunkReport]:
    """Return the reports, with a larger limit where noise changes the graphs' own chunk much.

    For each rejected chunk the graphs of `bundle` act again, with noise on the rows of the vision tower: as much as
    the median row of an engine of `rounding` may differ. The limit becomes twice the largest change of the chunk, if
    that is more. Runs that keep other tokens do not count. Without the files of the graphs nothing changes.
    """
    complete = all((bundle.path / spec.file).exists() for spec in bundle.manifest.graphs.values())
    rejected = [number for number, chunk in enumerate(chunks) if not chunk.passed] if complete else []
    judged, total = list(chunks), _RUNS * len(rejected)
    if not rejected:
        return judged
    noise = _Noise(bundle, limit_of("rows", rounding).typical)
    policy = Policy(bundle, load_backend(REFERENCE, compute="fp32"), wrap=noise.wrap)
    for place, number in enumerate(rejected):
        chunk, expected, changes = chunks[number], recording.chunks[number], [0.0]
        for run in range(_RUNS):
            progress.part("running the graphs with noise", place * _RUNS + run, total, "chunks")
            found = act_on_question(policy, question, chunk.method, chunk.budget)
            if kept_alike(found, expected) == 1:
                changes.append(float(chunk_differences(found, expected).max()))
        limit = max(chunk.limit or 0.0, float(f"{_ROOM * max(changes):.2g}"))
        judged[number] = replace(chunk, limit=limit, passed=chunk.difference <= limit)
    return judged


class _Noise:
    """Multiplies the rows that the vision tower gives by `1 + size * normal`."""

    def __init__(self, bundle: Bundle, size: float) -> None:
        outputs = bundle.manifest.graphs["vision"].outputs
        self._rows = [tensor.name for tensor in outputs if kind_of(tensor) == "rows"]
        self._size, self._draw = size, np.random.default_rng(0)

    def wrap(self, graph: str, engine: Engine, backend: Backend) -> Engine:
        """Return an engine with noise for the vision tower; a `sinkprune.runtime.steps.chain.Wrap`."""

        def noisy(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            outputs = dict(engine(inputs))
            for name in self._rows:
                rows = backend.numpy(outputs[name])
                factors = 1 + self._size * self._draw.standard_normal(rows.shape)
                outputs[name] = backend.tensor((rows * factors).astype(rows.dtype))
            return outputs

        return noisy if graph == "vision" else engine
