"""A chunk of actions, with its times and what was kept of the cameras' frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.flops import expert_flops, prefix_flops
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.runtime.steps.answer import DeadlineOutcome
from sinkprune.runtime.steps.kept import Kept

PARTS = ("preprocess", "vision", "sanitizer", "projector", "prefill", "select", "expert", "rest", "latency")
"""The timed parts of a chunk. `select` is part of `prefill`. All others add up to `latency`, the time from decoded
frames to actions."""


@dataclass(frozen=True)
class ActionFlops:
    """Matmul FLOPs of a chunk."""

    tower: int
    """The vision tower on all cameras."""
    projector: int
    """The projector on the tokens that are kept."""
    prefix: int
    """The decoder's prefix."""
    expert: int
    """All denoising steps."""

    @property
    def total(self) -> int:
        """All parts together."""
        return self.tower + self.projector + self.prefix + self.expert


@dataclass(frozen=True)
class ActionDeadline(DeadlineOutcome):
    """How a chunk met or missed its deadline. Milliseconds count from the call of `act`, with reading frames.

    `met`: the chunk took at most `deadline_ms`. `can_meet`: it was expected to, when `budget` and `steps` were
    chosen. `reason`: why they were chosen, in words. `slower`: how many times their costs recent chunks took, with a
    margin. docs/json-act.md explains each field.
    """

    steps: int
    """The chosen number of denoising steps."""
    expected_ms: float
    """When the chunk was expected, predicted when budget and steps were chosen."""


@dataclass(frozen=True, eq=False)
class ActionReport:
    """A chunk of actions, and how it came about.

    `actions` is [chunk,width] fp32, in the robot's units if `in_robots_units` is true. `ms` has milliseconds by part,
    with `latency` for the whole chunk, and `step_ms` those of each denoising step. docs/json-act.md explains each
    field.
    """

    actions: Array = field(repr=False)
    """[chunk,width] fp32: one row an action, in the robot's units or normalised."""
    in_robots_units: bool
    """Whether states and actions are in the robot's units. False for a checkpoint without their statistics."""
    method: str
    budget: str
    steps: int
    """Denoising steps."""
    prompt_tokens: int
    """Text tokens of the prompt."""
    visual_tokens: int
    """Visual tokens of all cameras before anything is dropped."""
    tokens_per_layer: list[int]
    """Visual tokens each decoder layer ran on; the expert's layer reads as many."""
    ms: Mapping[str, float]
    """Milliseconds by part, those of `PARTS`."""
    step_ms: list[float]
    """Milliseconds of each denoising step."""
    flops: ActionFlops
    images: tuple[Kept, ...]
    """What each step kept of each camera's tokens, in the order of the cameras with a frame."""
    camera_names: tuple[str, ...] | None = None
    """The names of these cameras; None if the policy's checkpoint has none."""
    deadline: ActionDeadline | None = None
    """How the deadline was met or missed; None without a deadline."""

    def as_json(self) -> dict[str, Any]:
        """Return the report without the arrays of its tokens, for `json.dumps`.

        The keys are those of a chunk of `sinkprune-act --json`, without `cameras`.
        """
        return {
            **{name: to_json(value) for name, value in vars(self).items() if name not in ("method", "images")},
            "actions": self.actions.tolist(),
            "rate_hz": 1e3 / self.ms["latency"],
            "flops": {**vars(self.flops), "total": self.flops.total},
            "kept": [kept.as_json() for kept in self.images],
        }


def by_part(ms: Mapping[str, float], expert: float) -> dict[str, float]:
    """Return the milliseconds of a chunk by the parts of `PARTS`; `expert` are those of all denoising steps."""
    found = {part: ms.get(part, 0.0) for part in PARTS} | {"expert": expert}
    found["rest"] = ms["latency"] - sum(found[part] for part in PARTS if part not in ("select", "rest", "latency"))
    return found


def chunk_flops(
    manifest: Manifest, steps: int, rows: int, layouts: Sequence[VisualLayout], lengths: Sequence[int]
) -> ActionFlops:
    """Return the FLOPs of a chunk: `rows` visual tokens go into the decoder, whose layers run on `lengths` tokens."""
    return ActionFlops(
        tower=sum(layout.tower_flops for layout in layouts),
        projector=rows * layouts[0].projector_flops,
        prefix=prefix_flops(manifest.language_model, lengths),
        expert=steps * expert_flops(manifest.acting, lengths),
    )
