"""The profile of a robot policy: what `sinkprune-profile --json` writes for one, field by field."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.contract.reports.report import EngineHeader, Spread
from sinkprune.contract.reports.rows import named_rows

PARTS = ("preprocess", "vision", "sanitizer", "projector", "prefill", "select", "step", "rest")
"""The timed parts of a chunk that do not depend on the number of denoising steps; `step` is one of them. `select` is
part of `prefill`, the decoder's run over the prefix. A chunk takes all others, with as many steps as it has."""


@dataclass(frozen=True)
class PolicyFlops:
    """Matmul FLOPs of a chunk's parts."""

    tower: int
    """The vision tower on all cameras."""
    projector: int
    """The projector on the tokens that are kept."""
    prefix: int
    """The decoder on the prefix."""
    step: int
    """The expert in one denoising step."""

    def chunk(self, steps: int) -> int:
        """Return the FLOPs of a chunk of so many denoising steps."""
        return self.tower + self.projector + self.prefix + steps * self.step


@dataclass(frozen=True)
class PrefixAndStep:
    """One figure for the decoder on the prefix, and one for a denoising step, which reads the prefix."""

    prefix: float
    step: float


@dataclass(frozen=True)
class PrefixEfficiency:
    """Measured speed-up divided by the ideal speed-up by FLOPs."""

    prefix: float


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
    flops: PolicyFlops
    speedup: PrefixAndStep
    """Compared with the unpruned engines, by median milliseconds."""
    flops_speedup: PrefixAndStep
    """Compared with the unpruned engines, by FLOPs alone."""
    efficiency: PrefixEfficiency
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
    first_chunk_ms: float | None
    """Milliseconds from opening the engines to the first chunk, which takes longer than later ones."""
    budgets: dict[str, PolicyBudgetReport]
    baselines: dict[str, dict[str, PolicyBudgetReport]]
    """The same of `downsample` and `downsample-ttft`, by method and budget, where the bundle has them."""

    def rows(self) -> dict[str, PolicyBudgetReport]:
        """Return all figures by the names of their rows, in the order of a table."""
        return named_rows(self.budgets, self.baselines)
