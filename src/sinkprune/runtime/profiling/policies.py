"""Measures a policy's budgets and numbers of denoising steps in turn, so that a drifting machine favours none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.precision import Array
from sinkprune.contract.reports.policy_report import (
    PARTS,
    ChunkReport,
    PolicyBudgetReport,
    PolicyFlops,
    PolicyReport,
    PrefixAndStep,
    PrefixEfficiency,
)
from sinkprune.contract.reports.report import Spread
from sinkprune.contract.reports.rows import Row, by_method, profile_rows
from sinkprune.runtime.acting.observation import Cameras
from sinkprune.runtime.acting.report import ActionReport
from sinkprune.runtime.policy import Policy
from sinkprune.runtime.profiling.plot import stacked_bars
from sinkprune.runtime.profiling.profile import Rounds, engine_header, ratio

_SEED = 0
"""All chunks begin with the same noise, which does not change their time."""
Kind = tuple[Row, int]
"""A method at a budget, and a number of denoising steps."""


class PolicyRounds(Rounds[Kind, ActionReport]):
    """Chunks of `method` at all `budgets` and unpruned, at each number of `steps`. A bundle's `BASELINES` run too.

    All chunks are of one moment: `cameras`, `instruction` and `state` as `Policy.act` takes them.
    """

    def __init__(
        self,
        policy: Policy,
        cameras: Cameras,
        instruction: str,
        state: Sequence[float] | Array,
        budgets: Sequence[str],
        steps: Sequence[int],
        *,
        method: str,
    ) -> None:
        super().__init__(product(profile_rows(policy.bundle.manifest.plans, method, budgets), dict.fromkeys(steps)))
        self._policy, self._method = policy, method
        self._act = partial(policy.act, cameras, instruction, state, seed=_SEED)

    def _run(self, kind: Kind, turn: int, on_run: Callable[[str], None]) -> ActionReport:
        row, steps = kind
        on_run(row.budget)
        return self._act(budget=row.budget, method=row.method, steps=steps)

    def report(self) -> PolicyReport:
        """Return the report of the complete rounds, one at least."""
        policy, first = self._policy, self._first
        runs = {kind: [found[kind] for found in self._rounds] for kind in self._kinds}
        any_run = self._rounds[0][self._kinds[0]]
        of_row: dict[Row, dict[int, list[ActionReport]]] = {}
        for (row, steps), own in runs.items():
            of_row.setdefault(row, {})[steps] = own
        unpruned = of_row[Row(self._method, UNPRUNED)]
        reports = by_method({row: _budget_report(own, unpruned) for row, own in of_row.items()})
        load_ms = policy.load_ms
        return PolicyReport(
            **vars(engine_header(policy, self._method, any_run.prompt_tokens)),
            cameras=len(any_run.images),
            actions=policy.facts.chunk,
            repeat=self.count,
            first_chunk_ms=None if load_ms is None or first is None else load_ms + first.ms["latency"],
            budgets=reports.pop(self._method),
            baselines=reports,
        )


def _budget_report(
    runs: dict[int, list[ActionReport]], unpruned: dict[int, list[ActionReport]]
) -> PolicyBudgetReport:
    """Return the report of a budget, whose `runs` are given by the number of steps, as are the `unpruned` ones."""
    ms, base_ms = _spreads(runs), _spreads(unpruned)
    flops, base_flops = _flops(runs), _flops(unpruned)
    one = next(iter(runs.values()))[0]
    speedup = PrefixAndStep(ratio(base_ms["prefill"], ms["prefill"]), ratio(base_ms["step"], ms["step"]))
    ideal = PrefixAndStep(base_flops.prefix / flops.prefix, base_flops.step / flops.step)
    return PolicyBudgetReport(
        visual_tokens=one.visual_tokens,
        kept_after_sanitizer=one.tokens_per_layer[0],
        tokens_per_layer=tuple(one.tokens_per_layer),
        mean_visual_tokens=sum(one.tokens_per_layer) / len(one.tokens_per_layer),
        ms=ms,
        flops=flops,
        speedup=speedup,
        flops_speedup=ideal,
        efficiency=PrefixEfficiency(speedup.prefix / ideal.prefix),
        chunks={
            str(steps): _chunk_report(own, unpruned[steps], base_flops.chunk(steps) / flops.chunk(steps))
            for steps, own in runs.items()
        },
    )


def _spreads(runs: dict[int, list[ActionReport]]) -> dict[str, Spread]:
    """Return the spread of each of `PARTS` over all chunks."""
    every = [run for own in runs.values() for run in own]
    steps = [ms for run in every for ms in run.step_ms]
    return {part: Spread.of(steps if part == "step" else [run.ms[part] for run in every]) for part in PARTS}


def _flops(runs: dict[int, list[ActionReport]]) -> PolicyFlops:
    """Return the FLOPs of the parts of a chunk."""
    one = next(iter(runs.values()))[0]
    return PolicyFlops(one.flops.tower, one.flops.projector, one.flops.prefix, one.flops.expert // one.steps)


def _chunk_report(
    runs: Sequence[ActionReport], unpruned: Sequence[ActionReport], flops_speedup: float
) -> ChunkReport:
    ms, base = (Spread.of([run.ms["latency"] for run in own]) for own in (runs, unpruned))
    return ChunkReport(
        ms=ms,
        rate_hz=1e3 / ms.median,
        jitter_ms=ms.p95 - ms.median,
        speedup=ratio(base, ms),
        flops_speedup=flops_speedup,
    )


def plot_policy(report: PolicyReport, suffix: str) -> bytes:
    """Return the bytes of a picture file with a stacked bar for each budget and number of steps."""
    rows, labels = {}, []
    for name, budget in report.rows().items():
        for steps, chunk in budget.chunks.items():
            own = {part: spread.median for part, spread in budget.ms.items()}
            own["expert"] = int(steps) * own.pop("step")
            own["prefill"] -= own["select"]
            # Medians of parts need not add up to the median of the whole.
            scale = chunk.ms.median / sum(own.values())
            rows[f"{name}, {steps} steps"] = {part: scale * ms for part, ms in own.items()}
            labels.append(f"{chunk.ms.median:.0f} ms, {chunk.rate_hz:.2g} Hz ({chunk.speedup:.2f}x)")
    title = f"{report.cameras} cameras, {report.prompt_tokens} text tokens, {report.actions} actions"
    below = "milliseconds (median of the whole chunk, divided as the medians of its parts)"
    return stacked_bars(report, rows, labels, title, below, suffix)
