"""What a robot asks its policy in a round: the same frames, state and noise for every engine."""

from __future__ import annotations

import numpy as np

from peer_engines.checkpoint import random_picture
from peer_engines.engine import Question
from sinkprune.contract.precision import Array

CAMERAS = {"pi0": 3, "openvla_oft": 2}
"""The cameras of each policy, by `model_type`."""


def moment(
    question: Question, cameras: int, state_dim: int, chunk: tuple[int, int]
) -> tuple[list[Array], Array, Array]:
    """Return frames of new random pictures, a state [state_dim] and noise `chunk` in fp32, by the question's seed."""
    frames = [random_picture(question.seed * cameras + camera, question.side) for camera in range(cameras)]
    rng = np.random.default_rng(question.seed)
    return frames, rng.normal(size=state_dim).astype(np.float32), rng.normal(size=chunk).astype(np.float32)


def largest_change(actions: Array, noise: Array) -> list[int]:
    """Return, in the place of an answer's tokens, the index of the number that the policy changed most."""
    return [int(np.abs(actions - noise).argmax())]
