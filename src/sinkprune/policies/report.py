"""What a chunk of actions reports, and what a policy's profile does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkprune.contract.checks import to_json
from sinkprune.contract.flops import policy_flops
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.report import EngineHeader, Spread, named_rows
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.steps.answer import DeadlineOutcome
from sinkprune.runtime.steps.decoding import Kept

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
    manifest: Manifest,
    steps: int,
    rows: int,
    layouts: Sequence[VisualLayout],
    lengths: Sequence[int],
    new_tokens: int | None,
) -> ActionFlops:
    """Return the FLOPs of a chunk: `rows` visual tokens go into the decoder, whose layers run on `lengths` tokens.

    `new_tokens` are decoded after them; None means the most.
    """
    prefix, step = policy_flops(manifest, lengths, new_tokens)
    return ActionFlops(
        tower=sum(layout.tower_flops for layout in layouts),
        projector=rows * layouts[0].projector_flops,
        prefix=prefix,
        expert=steps * step,
    )


PROFILE_PARTS = ("preprocess", "vision", "sanitizer", "projector", "prefill", "select", "step", "rest")
"""The timed parts of a chunk that do not depend on the number of denoising steps; `step` is one of them. `select` is
part of `prefill`, the decoder's run over the prefix. A chunk takes all others, with as many steps as it has."""


@dataclass(frozen=True)
class ChunkReport:
    """Whole chunks of a budget at one number of denoising steps."""

    ms: Spread
    """Milliseconds from decoded frames to actions."""
    rate_hz: float
    """Chunks a second, by the median."""
    jitter_ms: float
    """Milliseconds between the median and the 95th percentile."""
    speedup: float
    """Compared with unpruned chunks of as many steps, by median milliseconds."""
    flops_speedup: float
    """The same by FLOPs alone."""


@dataclass(frozen=True)
class PolicyBudgetReport:
    """The measurements of one budget, with the ideals by its FLOPs."""

    visual_tokens: int
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens in the input of each decoder layer; the expert's layer reads as many."""
    mean_visual_tokens: float
    ms: dict[str, Spread]
    """Milliseconds by part, those of `PARTS`, over the chunks of all numbers of steps."""
    flops: dict[str, int]
    """Matmul FLOPs: the vision `tower` on all cameras, the `projector` on the tokens that are kept, the decoder
    on the `prefix`, and the expert in one denoising `step`."""
    speedup: dict[str, float]
    """Of `prefix` and `step`, compared with the unpruned engines, by median milliseconds."""
    flops_speedup: dict[str, float]
    """The same by FLOPs alone."""
    efficiency: dict[str, float]
    """Of `prefix`: the measured speed-up divided by the one by FLOPs."""
    chunks: dict[str, ChunkReport]
    """By the number of denoising steps."""


@dataclass(frozen=True)
class PolicyReport(EngineHeader):
    """A profile of a policy: every budget and the unpruned engines at several numbers of steps, in turn."""

    cameras: int
    """Cameras with a frame."""
    actions: int
    """Actions of a chunk."""
    repeat: int
    """Measured chunks of each budget and number of steps."""
    other_load: float | None
    """The share of the processors that other programs took meanwhile, from 0 to 1; None if it is unknown. Times are
    doubtful above 0.25."""
    first_chunk_ms: float | None
    """Milliseconds from opening the engines to the first chunk, which takes longer than later ones."""
    budgets: dict[str, PolicyBudgetReport]
    baselines: dict[str, dict[str, PolicyBudgetReport]]
    """The same of `downsample` and `downsample-ttft`, by method and budget, where the bundle has them."""

    def rows(self) -> dict[str, PolicyBudgetReport]:
        """Return all figures by the names of their rows, in the order of a table."""
        return named_rows(self.budgets, self.baselines)
