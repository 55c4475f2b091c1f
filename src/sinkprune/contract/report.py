"""The times, tokens and FLOPs that a profile reports, as JSON and as rows of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.precision import WeightForms

BASELINES = ("downsample", "downsample-ttft")
"""The methods that give the model a smaller picture."""
Figures = TypeVar("Figures")


def in_order_of_rows(methods: Iterable[str]) -> list[str]:
    """Return methods in the order of a table's rows: `BASELINES` first."""
    return sorted(methods, key=lambda method: method not in BASELINES)


class Row(NamedTuple):
    """A row of a profile: a method at a budget."""

    method: str
    budget: str


def profile_rows(plans: Mapping[str, Collection[str]], method: str, budgets: Iterable[str]) -> list[Row]:
    """Return what a profile of `method` measures: the unpruned engines, the baselines, then the other budgets.

    `plans` has the budgets of each method that the bundle holds. A baseline is measured at those of `budgets` that it
    has, unless `method` is a baseline itself.
    """
    pruned = [budget for budget in dict.fromkeys(budgets) if budget != UNPRUNED]
    others = () if method in BASELINES else BASELINES
    baselines = [Row(other, budget) for other in others for budget in pruned if budget in plans.get(other, ())]
    return [Row(method, UNPRUNED), *baselines, *(Row(method, budget) for budget in pruned)]


def by_method(figures: Mapping[Row, Figures]) -> dict[str, dict[str, Figures]]:
    """Return the figures of rows by their method and budget."""
    found: dict[str, dict[str, Figures]] = {}
    for row, own in figures.items():
        found.setdefault(row.method, {})[row.budget] = own
    return found


def named_rows(budgets: Mapping[str, Figures], baselines: Mapping[str, Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of a profile by its rows, such as `none`, `downsample retain-64` and `retain-64`."""
    named = {f"{method} {budget}": own for method, each in baselines.items() for budget, own in each.items()}
    return {UNPRUNED: budgets[UNPRUNED], **named, **budgets}


IDLE_SECONDS = 5.0
"""The default time for measuring idle power."""


@dataclass(frozen=True)
class PowerReport:
    """The power sensor."""

    sensor: str
    measures: str
    """The measured rails, domains or GPU. Joules of two machines compare only if these do."""
    period_ms: float
    """The median time between two readings."""
    longest_gap_ms: float
    """The longest time between two readings."""
    idle_watts: float
    """The mean power before the first request, with loaded engines. It is subtracted from requests."""
    failure: str | None
    """The sensor's error, if it failed. Later requests have no joules."""


@dataclass(frozen=True)
class BudgetEnergy:
    """Mean joules of one budget's answers, from the request to the last token."""

    runs: int
    left_out: int
    """Runs without joules: the sensor had failed, or was silent for more than a second."""
    joules: float
    """Without idle watts times the answer's time. May be below zero if both are about equal."""
    joules_with_idle: float
    deviation: float | None
    """Standard deviation of `joules` over the runs; None for one run."""
    watts: float
    """Mean power of the answers, idle included."""
    estimated: bool
    """Whether an answer takes less than two periods of the sensor, so that its joules mostly belong to its
    neighbours."""


@dataclass(frozen=True)
class RateEnergy:
    """Joules of frames at a steady rate."""

    joules_per_frame: float
    """Of an answered frame, without idle power over the whole time, so that waiting counts too."""
    joules_per_frame_with_idle: float
    watts: float
    """Mean power of the whole time, idle included."""


FEWEST_OF_P95 = 20
"""With fewer measurements, the 95th percentile is close to the slowest."""


def percentile(ordered: Sequence[float], share: int) -> float:
    """Return the smallest of the ascending values that is not exceeded by `share` % of them."""
    return ordered[math.ceil(share * len(ordered) / 100) - 1]


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of repeated measurements."""

    median: float
    p95: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return Spread(statistics.median(values), percentile(sorted(values), 95))


@dataclass(frozen=True)
class PrefillAndTtft:
    """One figure for the prefill and one for the time to first token."""

    prefill: float
    ttft: float


@dataclass(frozen=True)
class Efficiency:
    """Measured speed-up divided by the ideal speed-up by FLOPs."""

    prefill: float


@dataclass(frozen=True)
class BudgetReport:
    """The measurements of one budget, with the ideals by its FLOPs and bytes."""

    visual_tokens: int
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens in the input of each decoder layer."""
    mean_visual_tokens: float
    ms: dict[str, Spread | None]
    """Milliseconds by part; `per_token` is None where only one token was generated."""
    flops: PrefillAndTtft
    flops_speedup: PrefillAndTtft
    """Compared with the unpruned engines, by FLOPs alone."""
    speedup: PrefillAndTtft
    """Compared with the unpruned engines, by median milliseconds."""
    efficiency: Efficiency
    kv_bytes: int
    """Keys and values after the prefill."""
    peak_rss_bytes: int | None
    """Largest resident memory of the process during this budget's runs; None if it is unknown."""
    stage_peak_rss_bytes: dict[str, int]
    """The same during each stage: vision, sanitizer, projector, prefill with its selects, decode. Of the budget's
    first run that counts. Engines keep their memory, so a stage includes the memory of earlier stages."""
    decode_tokens_per_s: float | None
    decode_gb_per_s: float | None
    """Decoder and head weights and KV cache, read once a token."""
    energy: BudgetEnergy | None
    """None without power readings of this budget's runs."""
    warm_ttft_ms: Spread | None
    """Milliseconds to the first token of a second question about the picture in a `Session`; None if not measured."""


@dataclass(frozen=True)
class CaptureReport:
    """What is captured as CUDA graphs, and replayed with one launch."""

    bytes: int
    """Device memory that captured graphs take, at least 1 MiB each."""
    most_bytes: int
    """The limit of `bytes`, from which the least recently used graphs go; 0 where nothing can be captured."""
    graphs: dict[str, dict[str, int]]
    """By graph, how often it was `captured`, `replayed` and `released`."""
    not_captured: dict[str, str]
    """By graph, why it runs kernel by kernel."""
    without_kernels: dict[str, str]
    """By sanitizer, why it runs function bodies in the place of kernels."""


@dataclass(frozen=True)
class EngineHeader:
    """The head of every report: model, backend and machine."""

    model: str
    backend: str
    precision: str
    """The type of hidden states and caches."""
    weights: WeightForms
    compute: str
    """The type that engines compute in, in words."""
    cache: str
    """The type of keys and values, in words."""
    method: str
    machine: str
    threads: int
    prompt_tokens: int
    """Text tokens of the rendered prompt."""
    load_ms: float | None
    """Milliseconds of opening and loading the engines, with comparing sums."""
    versions: dict[str, str]
    captured: CaptureReport | None = field(default=None, kw_only=True)
    """What backends on CUDA captured; None for others."""


@dataclass(frozen=True)
class ReportHeader(EngineHeader):
    """The head of every report about answers."""

    new_tokens: int
    power: PowerReport | None
    """None if no joules were requested."""


@dataclass(frozen=True)
class ProfileReport(ReportHeader):
    """A profile: every budget and the unpruned engines, measured in turn."""

    repeat: int
    other_load: float | None
    """The share of the processors that other programs took meanwhile, from 0 to 1; None if it is unknown. Times are
    doubtful above 0.25."""
    first_answer_ms: float | None
    """Milliseconds from opening the engines to the first token of the first answer, which takes longer than later
    ones."""
    seen_share: tuple[float, ...]
    """For each picture, the share of its area that the model sees."""
    budgets: dict[str, BudgetReport]
    baselines: dict[str, dict[str, BudgetReport]]
    """The same of `downsample` and `downsample-ttft`, by method and budget, where the bundle has them."""

    def rows(self) -> dict[str, BudgetReport]:
        """Return all figures by the names of their rows, in the order of a table."""
        return named_rows(self.budgets, self.baselines)


@dataclass(frozen=True)
class Latency:
    """Milliseconds of repeated requests. A percentile is the smallest value not exceeded by that share of them."""

    mean: float
    p50: float
    p95: float
    p99: float
    maximum: float
    jitter: float
    """Standard deviation; 0 for one value."""

    @staticmethod
    def of(values: Sequence[float]) -> Latency:
        """Return the statistics of at least one value."""
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in (50, 95, 99))
        return Latency(statistics.fmean(ordered), p50, p95, p99, ordered[-1], statistics.pstdev(ordered))


@dataclass(frozen=True)
class BudgetRate:
    """The frames and answers of one budget."""

    visual_tokens: int
    """Of the first frame's prompt."""
    kept_after_sanitizer: int
    tokens_per_layer: tuple[int, ...]
    """Visual tokens in each decoder layer, of the first frame's prompt."""
    start_s: float
    """The time of the budget's first frame, in seconds from the first frame of all."""
    seconds: float
    """From the first frame to the last answer, or to the time of a frame after the last."""
    frames: int
    """The number of frames."""
    answered: int
    missed: int
    """Frames that came and went during the answer to an earlier one."""
    latency_ms: Latency
    """From a frame's arrival to its whole answer, with waiting."""
    busy_ms: Latency
    """From the start of a request to its whole answer."""
    answered_frames: tuple[int, ...]
    """The numbers of answered frames, from 0."""
    answer_latency_ms: tuple[float, ...]
    """The latency of each answered frame."""
    energy: RateEnergy | None
    """None without power readings of the whole time."""


@dataclass(frozen=True)
class ConditionsReport:
    """Temperatures and clocks, each a list as long as `seconds`, with None for missing readings."""

    seconds: tuple[float, ...]
    """From the first frame of all."""
    temperatures_c: dict[str, tuple[float | None, ...]]
    clocks_mhz: dict[str, tuple[float | None, ...]]


@dataclass(frozen=True)
class RateReport(ReportHeader):
    """Budgets in turn, each at a camera's steady rate."""

    rate_hz: float
    duration_s: float
    """The duration of frames for each budget."""
    pictures: int
    """The number of different prompts that frames alternate between."""
    warmup: int
    seen_share: float
    """The share of its area that the model sees of the picture it sees least of."""
    rates: dict[str, BudgetRate]
    """By the budget's name."""
    conditions: ConditionsReport
