"""The stages of the trainings of the pocket models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pocket_training.lessons import LESSONS
from sinkprune.demo.questions import KINDS, VARIED_KINDS


@dataclass(frozen=True)
class Stage:
    """A part of the training, with a learning rate that changes linearly from the first value to the second."""

    name: str
    steps: int
    pictures: int
    """Pictures a step."""
    learning_rate: tuple[float, float]
    questions: int = 0
    """Questions a picture; 0 leaves the LLM out."""
    visual_tokens: int = 256
    """Visual tokens of each picture: centres of things first, then others of things, then random background.

    The robot's steps have 0.6 to 1.4 times as many."""
    probe_weight: float = 1.0
    """The weight of the losses for what patches show and what that is called."""
    most_objects: int = 6
    """The most objects in a picture."""
    kinds: tuple[str, ...] = (*KINDS, *LESSONS)
    """Kinds of questions."""
    described: bool = False
    """Whether to ask for the picture's description too. Its many tokens outweigh those of other answers."""
    warm_up: int = 0
    """Steps over which the learning rate rises from 0."""
    shrunk: float = 0.0
    """The share of steps whose pictures are shrunk to between `LEAST_FACTOR` and 1 of their size."""
    layers: tuple[int, ...] | None = None
    """The layers of the decoder that are run, by default all. The others must pass their input on."""


def schedule(stages: Sequence[Stage]) -> Iterator[tuple[Stage, int, int]]:
    """Yield the stage, the number and the first training picture of each step."""
    step = picture = 0
    for stage in stages:
        for _ in range(stage.steps):
            yield stage, step, picture
            step, picture = step + 1, picture + stage.pictures


def rate_at(stages: Sequence[Stage], stage: Stage, step: int) -> float:
    """Return the learning rate at `step` of the whole training, which lies in `stage`."""
    begin = sum(earlier.steps for earlier in stages[: stages.index(stage)])
    first, last = stage.learning_rate
    rate = first + (last - first) * (step - begin) / stage.steps
    return rate * min(1.0, (step - begin + 1) / max(1, stage.warm_up))


_EVERY = (*KINDS, *LESSONS)
# Kinds with many wrong answers after stage "four"; counting and relations take longest.
_HARD = ("existence-random", "existence-adversarial", *3 * ("relation",), *3 * ("counting",), "place")
_COUNTING = (*10 * ("counting",), *2 * ("relation",), "size", "choice")
LLAVA_STAGES = (
    Stage("vision", 700, 16, (1.2e-3, 9e-4), visual_tokens=96, warm_up=100),
    Stage("two", 700, 12, (8e-4, 8e-4), 8, 32, 0.3, 2, described=True, warm_up=100),
    Stage("four", 500, 8, (8e-4, 7e-4), 8, 48, 0.3, 4, described=True),
    Stage("six", 1000, 6, (7e-4, 5.5e-4), 10, 64, 0.3, 6, (*_EVERY, *_HARD)),
    Stage("things", 700, 6, (5.5e-4, 4.864e-4), 10, 112, 0.3, 6, (*_EVERY, *_HARD)),
    Stage("counting", 500, 6, (4.8e-4, 4.5e-4), 20, 112, 0.3, 6, (*KINDS, *_COUNTING)),
    Stage("whole", 1000, 6, (4.5e-4, 0.0), 20, 256, 0.2, 6, (*KINDS, *_COUNTING)),
)

# Tunes the trained model, so that its tower gets outliers and the LLM reads them.
OUTLIER_STAGES = (Stage("outliers", 500, 4, (5e-4, 0.0), 12, 256, 0.3, 6, (*KINDS, *_COUNTING), warm_up=30),)

LEAST_FACTOR = 0.45
FIRST_LAYERS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14)
"""The layers of Qwen3-VL's decoder that are trained first: several in each segment between its pruning stages."""
_NEW = ("small-text", "two-step-reading", "two-step-shape", "two-step-place")
_VARIED = (*KINDS, *LESSONS, *_NEW)
_HARD_VARIED = (*_VARIED, *_HARD, *3 * ("two-step-shape", "two-step-place", "colour"), "two-step-reading", "choice")
_LAST_VARIED = (
    *_VARIED,
    *12 * ("counting",),
    *4 * ("two-step-shape",),
    *2 * ("relation", "two-step-place"),
    *("two-step-reading", "small-text", "choice"),
)
QWEN_STAGES = (
    Stage("vision", 600, 16, (1.2e-3, 9e-4), visual_tokens=32, most_objects=8, warm_up=100),
    Stage("two", 700, 8, (8e-4, 8e-4), 8, 20, 0.3, 2, _VARIED, True, 100, layers=FIRST_LAYERS),
    Stage("four", 300, 8, (8e-4, 7e-4), 8, 28, 0.3, 4, _VARIED, True, layers=FIRST_LAYERS),
    Stage("eight", 300, 6, (7e-4, 6.8e-4), 12, 48, 0.3, 8, _HARD_VARIED, layers=FIRST_LAYERS),
    Stage("sizes", 500, 6, (6.8e-4, 6e-4), 12, 48, 0.3, 8, _HARD_VARIED, shrunk=0.4, layers=FIRST_LAYERS),
    Stage("scales", 300, 12, (7e-4, 6e-4), 4, 48, 1.0, 8, _LAST_VARIED, shrunk=0.7, layers=FIRST_LAYERS),
    Stage("whole", 500, 6, (6e-4, 0.0), 18, 256, 0.2, 8, _LAST_VARIED, shrunk=0.3, layers=FIRST_LAYERS),
    Stage("deep", 1200, 6, (4e-4, 0.0), 16, 256, 0.2, 8, _LAST_VARIED, shrunk=0.3, warm_up=100),
)
MEASURED_KINDS = tuple(kind for kind in VARIED_KINDS if not kind.endswith("-of-two"))
ROBOT_STAGES = (
    Stage("vision", 250, 8, (1.2e-3, 1e-3), visual_tokens=40, warm_up=50),
    Stage("two", 400, 8, (8e-4, 8e-4), 1, 28, 1.0, 2, warm_up=50),
    Stage("five", 450, 8, (8e-4, 7e-4), 1, 40, 0.5, 5),
    Stage("many", 100, 8, (6e-4, 5e-4), 1, 64, 0.3, 5),
    Stage("whole", 200, 4, (5e-4, 0.0), 1, 1000, 0.2, 5),
)
OFT_STAGES = (
    # From the weights of the pocket robot's pi0.
    Stage("five", 900, 4, (4e-4, 3e-4), 1, 28, 0.2, 5, warm_up=30),
    Stage("whole", 300, 4, (3e-4, 0.0), 1, 1000, 0.1, 5),
)
