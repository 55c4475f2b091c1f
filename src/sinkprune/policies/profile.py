"""Measures a policy at each of its budgets."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import counted, format_value
from sinkprune.contract.command_line.options import CommandParser
from sinkprune.contract.command_line.table_console import (
    USUAL_REPEAT,
    TableConsole,
    few_note,
    make_table,
    median_text,
    spread_text,
)
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.precision import Array
from sinkprune.contract.report import Row, Spread, by_method, profile_rows
from sinkprune.policies.observation import STEPS, Cameras
from sinkprune.policies.options import Observations, add_cameras, add_state, check_kind_options, given_observations
from sinkprune.policies.policy import Policy
from sinkprune.policies.report import PROFILE_PARTS, ActionReport, ChunkReport, PolicyBudgetReport, PolicyReport
from sinkprune.runtime.commands.options import Options, check_memory
from sinkprune.runtime.commands.profile import (
    ProfileExtension,
    measured_rounds,
    parts_table,
    print_load,
    print_spread,
    row_name,
)
from sinkprune.runtime.commands.reports import name_list, write_measured
from sinkprune.runtime.commands.run import note_pictures
from sinkprune.runtime.families import load_family
from sinkprune.runtime.profiling.plot import stacked_bars
from sinkprune.runtime.profiling.profile import Rounds, engine_header, ratio
from sinkprune.runtime.steps.pictures import decoded

_FEWER_STEPS = (5, 2)
_LEGEND = (
    "speed-ups are over none, of chunks with as many steps; ideal: by FLOPs; prefill: the decoder on frames and text"
    "; denoising step: the expert, once; mean of layers: in % of none's visual tokens; jitter: p95 less median"
)
_SHOWN_PARTS = tuple(part for part in PROFILE_PARTS if part not in ("select", "step"))
_SEED = 0
"""All chunks begin with the same noise, which does not change their time."""
_OF_ANSWERS = ("image", "video", "frames", "rate", "duration", "new_tokens", "warm", "power", "idle", "fit")
"""The options that a robot policy does not take."""
_OF_POLICIES = ("camera", "state", "steps")
"""The options that a model that answers does not take."""
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
            other_load=self.other_load,
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
    speedup = {"prefix": ratio(base_ms["prefill"], ms["prefill"]), "step": ratio(base_ms["step"], ms["step"])}
    ideal = {part: base_flops[part] / flops[part] for part in speedup}
    return PolicyBudgetReport(
        visual_tokens=one.visual_tokens,
        kept_after_sanitizer=one.tokens_per_layer[0],
        tokens_per_layer=tuple(one.tokens_per_layer),
        mean_visual_tokens=sum(one.tokens_per_layer) / len(one.tokens_per_layer),
        ms=ms,
        flops=flops,
        speedup=speedup,
        flops_speedup=ideal,
        efficiency={"prefix": speedup["prefix"] / ideal["prefix"]},
        chunks={str(steps): _chunk_report(own, unpruned[steps]) for steps, own in runs.items()},
    )


def _spreads(runs: dict[int, list[ActionReport]]) -> dict[str, Spread]:
    every = [run for own in runs.values() for run in own]
    steps = [ms for run in every for ms in run.step_ms]
    return {part: Spread.of(steps if part == "step" else [run.ms[part] for run in every]) for part in PROFILE_PARTS}


def _flops(runs: dict[int, list[ActionReport]]) -> dict[str, int]:
    one = next(iter(runs.values()))[0]
    flops = vars(one.flops)
    return {**{part: flops[part] for part in ("tower", "projector", "prefix")}, "step": flops["expert"] // one.steps}


def _chunk_report(runs: Sequence[ActionReport], unpruned: Sequence[ActionReport]) -> ChunkReport:
    ms, base = (Spread.of([run.ms["latency"] for run in own]) for own in (runs, unpruned))
    return ChunkReport(
        ms=ms,
        rate_hz=1e3 / ms.median,
        jitter_ms=ms.p95 - ms.median,
        speedup=ratio(base, ms),
        flops_speedup=unpruned[0].flops.total / runs[0].flops.total,
    )


def plot_policy(report: PolicyReport, suffix: str) -> bytes:
    """Return the bytes of a picture file with a stacked bar for each budget and number of steps."""
    rows, labels, spreads = {}, [], []
    for name, budget in report.rows().items():
        for steps, chunk in budget.chunks.items():
            own = {part: spread.median for part, spread in budget.ms.items()}
            own["expert"] = int(steps) * own.pop("step")
            own["prefill"] -= own["select"]
            # Medians of parts need not add up to the median of the whole.
            scale = chunk.ms.median / sum(own.values())
            rows[f"{name}, {steps} steps"] = {part: scale * ms for part, ms in own.items()}
            spreads.append(chunk.ms)
            rate = f"{chunk.rate_hz:.2g} chunks a second ({chunk.speedup:.2f} x as fast)"
            labels.append(f"{chunk.ms.median:.0f} ms; {rate}")
    title = f"{report.cameras} cameras, {report.prompt_tokens} text tokens, {report.actions} actions"
    below = "milliseconds: median of the whole chunk, divided as the medians of its parts; the line ends at p95"
    return stacked_bars(report, rows, spreads, labels, title, below, suffix)


class PolicyProfile(ProfileExtension):
    """`sinkprune-profile` of a robot policy."""

    @staticmethod
    def add_sources(group: Any) -> None:
        add_cameras(group, " of a robot policy")

    @staticmethod
    def add_options(parser: CommandParser) -> None:
        add_state(parser)
        parser.group("answer").add_argument(
            "--steps",
            type=_step_list,
            metavar="N,N",
            help="for a robot policy: denoising steps, comma-separated (default: the checkpoint's, 5 and 2)",
        )

    def profiled(self, bundle: Bundle) -> bool:
        options = self.options
        if bundle.manifest.policy is None:
            check_kind_options(options, bundle, _OF_POLICIES, ("image",) if options.camera else ())
            return False
        check_kind_options(options, bundle, _OF_ANSWERS, ("camera", "state"))
        observations = given_observations(options.camera, options.state)
        check_outputs(options.outputs, observations.files)
        _profile(options, bundle, observations)
        return True


def _step_list(words: str) -> list[int]:
    """Return the numbers of steps in a comma-separated option; raises `ArgumentTypeError`."""
    try:
        return [STEPS.named("--steps").check(int(word)) for word in name_list(words)]
    except ValueError as error:
        raise ArgumentTypeError(f"found {format_value(words)}, expected whole numbers with commas between") from error


def _profile(options: Options, bundle: Bundle, observations: Observations) -> None:
    """Measure the policy `bundle`, print a table, and write the report, also of complete rounds after Ctrl-C."""
    manifest = bundle.manifest
    if len(observations.moments) > 1:
        raise UsageError(
            f"found {len(observations.moments)} moments, expected one: all budgets are measured on the same frames. "
            "Give a file for each camera."
        )
    observations = observations.for_policy(manifest.acting)
    (moment,) = observations.moments
    usual = manifest.acting.steps
    steps = options.steps or [usual, *(fewer for fewer in _FEWER_STEPS if fewer < usual)]
    notes = observations.check(manifest, options.prompt, steps=max(options.steps) if options.steps else None)
    budgets = list(dict.fromkeys([UNPRUNED, *(options.budgets or manifest.plans[options.method])]))
    family = load_family(manifest, None)
    # Decoded once: files would count as part of no chunk, and take time between them.
    frames = [None if path is None else decoded(path, family) for path in moment.cameras]
    given = [frame for frame in frames if frame is not None]
    files = [path for path in moment.cameras if path is not None]
    notes += note_pictures(family, files, given)
    check_memory(options, bundle, [*map(family.layout, given)], options.method, budgets, options.prompt, 0)
    observations.print_order(manifest.acting)
    policy = Policy.load(bundle, **options.loading)
    rounds = PolicyRounds(policy, frames, options.prompt, moment.state, budgets, steps, method=options.method)
    interrupted = measured_rounds(rounds, options.repeat or USUAL_REPEAT, options.warmup, "chunks")
    report = rounds.report()
    write_measured(options, report, plot_policy, lambda: _print_tables(report), notes, interrupted)


def _print_tables(report: PolicyReport) -> None:
    console = TableConsole()
    console.print_machine(
        report,
        f"{counted(report.cameras, 'camera')}, {report.prompt_tokens} text tokens, {report.actions} actions a chunk; "
        f"milliseconds, median (95th percentile) of {counted(report.repeat, 'interleaved run')}"
        f"{few_note(report.repeat)}",
    )
    rows, unpruned = report.rows(), report.budgets[UNPRUNED].mean_visual_tokens
    rates = ["chunks a\nsecond", "jitter", "speed-up\nof chunk", "ideal of\nchunk"]
    chunks = make_table(["budget"], ["denoising\nsteps", "whole\nchunk", *rates])
    parts = parts_table(_SHOWN_PARTS, "denoising\nstep")
    kept = ["visual\ntokens", "into the\ndecoder", "in its\nlast layer", "mean of\nlayers, %"]
    compared = ["speed-up\nof prefill", "ideal of\nprefill", "share of\nthe ideal", "speed-up\nof a step"]
    tokens = make_table(["budget"], [*kept, *compared])
    for name, budget in rows.items():
        for steps, chunk in budget.chunks.items():
            chunks.add_row(
                row_name(name),
                steps,
                spread_text(chunk.ms),
                f"{chunk.rate_hz:.2f}",
                f"{chunk.jitter_ms:.1f}",
                f"{chunk.speedup:.2f}",
                f"{chunk.flops_speedup:.2f}",
            )
        parts.add_row(row_name(name), *(median_text(budget.ms[part]) for part in (*_SHOWN_PARTS, "select", "step")))
        tokens.add_row(
            row_name(name),
            *map(str, (budget.visual_tokens, budget.kept_after_sanitizer, budget.tokens_per_layer[-1])),
            f"{100 * budget.mean_visual_tokens / unpruned:.1f}",
            f"{budget.speedup['prefix']:.2f}",
            f"{budget.flops_speedup['prefix']:.2f}",
            f"{100 * budget.efficiency['prefix']:.0f} %",
            f"{budget.speedup['step']:.2f}",
        )
    for table in (chunks, parts, tokens):
        console.print(table)
    console.print_text(_LEGEND)
    for steps in report.budgets[UNPRUNED].chunks:
        spreads = {name: budget.chunks[steps].ms for name, budget in rows.items()}
        print_spread(console, f"a chunk of {counted(int(steps), 'step')} at one budget", report.repeat, spreads)
    print_load(console, report.other_load)
    if report.load_ms is not None and report.first_chunk_ms is not None:
        console.print(
            f"loaded in {report.load_ms:.0f} ms, the first chunk was there at {report.first_chunk_ms:.0f} ms"
        )
