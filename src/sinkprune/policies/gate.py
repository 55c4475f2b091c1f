"""A robot policy as the gate of engines runs it."""

from __future__ import annotations

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.precision import Array
from sinkprune.engines.gate.recording import Act, GateChunk, GateQuestion, kept_by_step
from sinkprune.policies.policy import Policy
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.steps.chain import Wrap

_SEED = 0
"""The seed of a chunk's noise."""


class _ChunkObserver(Observer):
    actions: Array

    def acted(self, actions: Array) -> None:
        self.actions = actions


def load_act(bundle: Bundle, backend: Backend, built: BuiltEngines | None, wrap: Wrap | None) -> Act:
    """Load a policy; returns what acts from the same noise and in the middle of the training data each time."""
    policy = Policy(bundle, backend, built, wrap)

    def act(question: GateQuestion, method: str, budget: str) -> GateChunk:
        seen = _ChunkObserver()
        report = policy.act(
            list(question.images),
            question.prompt,
            policy.facts.usual_state,
            method=method,
            budget=budget,
            seed=_SEED,
            observer=seen,
        )
        kept = [tokens.tolist() for own in report.images for tokens in kept_by_step(own)]
        return GateChunk(method, budget, report.steps, seen.actions[0].tolist(), kept)

    return act
