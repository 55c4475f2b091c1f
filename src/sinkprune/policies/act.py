"""`sinkprune-act`: a robot policy's next chunk of actions, for one moment or for every frame of folders.

With `--rate` it runs the policy's loop over recorded moments, at the rate of an arm that is not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import counted, to_json
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import RunningOutput, json_outputs, write_each, write_json, write_output
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import DeadlineError, SinkpruneError, UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import VisualLayout
from sinkprune.deadlines.costs import ActionCosts
from sinkprune.deadlines.measuring import MEASURING_COSTS
from sinkprune.deadlines.options import check_cost_options, first_budgets, how_late, place_here, saved_costs_lines
from sinkprune.policies.deadline import check_costs, check_least_steps
from sinkprune.policies.loop import HORIZON, JOINS, MAX_AGE_MS, RATE_HZ, LoopReport, Observed, PolicyLoop
from sinkprune.policies.observation import SEED, STEPS
from sinkprune.policies.options import Moment, Observations, add_cameras, add_state, given_observations
from sinkprune.policies.policy import Policy
from sinkprune.policies.report import ActionDeadline, ActionReport
from sinkprune.runtime.commands.interrupted import beside_earlier
from sinkprune.runtime.commands.options import (
    NO_COSTS,
    Options,
    add_costs,
    add_method,
    check_memory,
    engine_parser,
    explain_interrupt,
)
from sinkprune.runtime.commands.run import decoded_facts, note_files, note_sizes
from sinkprune.runtime.families import load_family
from sinkprune.runtime.loading import check_kind
from sinkprune.runtime.media.images import PICTURE_SUFFIXES, read_image
from sinkprune.runtime.overlay import overlay, picture_bytes
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import DEADLINE_MS

_EXAMPLES = """\
examples:
  sinkprune-act policy --camera base.jpg --camera wrist.jpg --instruction "pick up the cup" \\
      --state 0.1,0.2,0.3 --budget prune-77.8 --overlay kept.png
  sinkprune-act policy --camera base.jpg --camera none --instruction "pick up the cup" --state state.json --json
  sinkprune-act policy --camera wrist=wrist/ --camera base=base/ --instruction "pick up the cup" --state states.csv
  sinkprune-act policy --camera base/ --camera wrist/ --instruction "pick up the cup" --state states.csv \\
      --deadline-ms 300 --min-steps 4
  sinkprune-act policy --camera base/ --camera wrist/ --instruction "pick up the cup" --state states.csv --rate 10
"""
_NO_CHUNK = "no whole chunk was computed, so nothing was kept."
_SHOWN = 8
"""How many numbers of an action a line has; --json has all."""
_OF_LOOP = ("join", "execution_horizon", "max_age_ms")
"""Options that need `--rate`."""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parse(arguments)
    observations = given_observations(options.camera, options.state)
    overlays = [(options.overlay, PICTURE_SUFFIXES)] if options.overlay else []
    folders = [*options.folders, *observations.folders]
    read = [*observations.files, *options.key_files, *([options.costs] if options.costs else [])]
    check_outputs([*json_outputs(options.json), *overlays], read, folders)
    _check_combinations(options, observations)
    bundle, observations, notes = _open(options, observations)
    manifest, (first, *_) = bundle.manifest, observations.moments
    given = [path for path in first.cameras if path is not None]
    costs = _usable_costs(options, bundle, len(given)) if options.deadline_ms is not None else None
    family = load_family(manifest, None)
    pictures = [decoded(path, family) for path in given]
    notes += note_files(dict(observations.facts) | decoded_facts(given, pictures))
    notes += note_sizes(family, given, pictures)
    layouts = [*map(family.layout, pictures)]
    memory = check_memory(options, bundle, layouts, options.method, [options.budget], options.instruction, 0)
    observations.print_order(manifest.acting)
    policy = Policy.load(bundle, **options.loading)
    if options.deadline_ms is not None:
        _prepare(policy, costs, first, layouts, options)
    facts = {
        "method": options.method,
        "backend": policy.backend.name,
        "precision": manifest.precision,
        "load_ms": policy.load_ms,
        "memory": memory._asdict(),
        "notes": notes,
    }
    if options.rate is not None:
        _rehearse(policy, observations.moments, options, facts)
        return
    chunks, interrupted, earlier, outputs = list[ActionReport](), "", "", options
    total, ended, kept = len(observations.moments), None, ""
    output = RunningOutput(options.json, options.overlay)
    try:
        with explain_interrupt(_NO_CHUNK), output.until_written("acting") as progress:
            for moment in observations.moments:
                seen = [*moment.cameras], options.instruction, moment.state
                chunks.append(policy.act(*seen, seed=options.seed, **_of_chunks(options)))
                progress("acting", len(chunks), total, "chunks")
                output.write(_line(chunks[-1], len(chunks), total))
    except (KeyboardInterrupt, SinkpruneError) as end:
        if not chunks:
            raise
        ended, kept = end, f"{len(chunks)} of {counted(total, 'chunk')}."
        interrupted = f"there are {kept}"
        outputs, earlier = beside_earlier(options, "json")
    if chunks[-1].deadline is not None:
        output.write(f"deadline {options.deadline_ms:g} ms: {_met(chunks)}\n")
    if policy.costs is not None:
        sys.stderr.write(late_chunks_line([chunk.deadline for chunk in chunks if chunk.deadline is not None]))
        sys.stderr.write(saved_costs_lines(policy, options, measured=costs is None))
    summary = {
        **facts,
        "captured": to_json(policy.backend.captured()),
        "interrupted": interrupted or None,
        "chunks": [
            {"cameras": [None if path is None else str(path) for path in moment.cameras], **chunk.as_json()}
            for chunk, moment in zip(chunks, observations.moments, strict=False)
        ],
    }
    drawn = options.overlay if ended is None else None
    write_each(
        lambda: write_json(outputs.json, summary),
        *([lambda: _draw(drawn, chunks[-1], first, options.instruction)] if drawn else []),
    )
    if isinstance(ended, SinkpruneError):
        raise type(ended)(f"moment {len(chunks) + 1} of {total}: {ended} There are {kept}{earlier}") from ended
    if ended:
        raise KeyboardInterrupt(interrupted + earlier) from ended
    output.end()


def _of_chunks(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("budget", "method", "steps", "deadline_ms", "min_steps")}


class _RecordedArm:
    """An arm that plays its recorded moments, one a tick from the first action on, and notes what it is sent."""

    def __init__(self, moments: Sequence[Moment], rate: float) -> None:
        # Decoded before, as a camera's driver does it.
        self._moments = [
            ([None if path is None else read_image(path) for path in one.cameras], one.state) for one in moments
        ]
        self._rate, self._began = rate, 0.0
        self.actions: list[list[float]] = []

    def observe(self) -> Observed:
        place = int((time.monotonic() - self._began) * self._rate) if self.actions else 0
        cameras, state = self._moments[min(place, len(self._moments) - 1)]
        return Observed(cameras, state, time.monotonic())

    def send(self, action: Array) -> None:
        if not self.actions:
            self._began = time.monotonic()
        self.actions.append(action.tolist())


def _rehearse(policy: Policy, moments: Sequence[Moment], options: Options, facts: dict[str, Any]) -> None:
    """Run the loop over all moments, print what it did, and write its report; raises the fault that ended it."""
    given = {name: value for name in _OF_LOOP if (value := getattr(options, name)) is not None}
    given |= {"rate_hz": options.rate, **_of_chunks(options)}
    output = RunningOutput(options.json)
    with explain_interrupt("the loop did not come to its end, so nothing was kept."), output.until_written("acting"):
        arm = _RecordedArm(moments, options.rate)
        loop = PolicyLoop(policy, arm.observe, arm.send, options.instruction, **given)
        report = loop.run(len(moments) / options.rate)
    output.write(_loop_lines(report))
    captured = to_json(policy.backend.captured())
    write_json(options.json, {**facts, "captured": captured, "loop": report.as_json(), "actions": arm.actions})
    if (fault := report.fault) is not None:
        if fault.error is not None and not isinstance(fault.error, SinkpruneError):
            raise fault.error
        raise SinkpruneError(
            f"the loop stopped at tick {fault.tick} ({fault.kind}): {fault.message}"
        ) from fault.error
    output.end()


def _parse(arguments: Sequence[str] | None) -> Options:
    parser = engine_parser(
        "sinkprune act",
        "Return a robot policy's next chunk of actions, from frames, instruction and state.",
        _EXAMPLES,
    )
    question, budget = parser.group("picture and question"), parser.group("budget").add_argument
    folders = "; or a folder of frames, for a chunk each in the order of the numbers in their names"
    add_cameras(question, folders, required=True)
    question.add_argument("--instruction", "--prompt", required=True, help="what the robot is to do")
    add_state(parser)
    budget(
        "--budget",
        default=UNPRUNED,
        help="a budget of the bundle, or none; with --deadline-ms the largest that may be chosen (default: none)",
    )
    add_method(parser)
    add = parser.group("answer").add_argument
    add(
        "--steps",
        type=STEPS,
        metavar="N",
        help="denoising steps; with --deadline-ms the most (default: the checkpoint's)",
    )
    add("--seed", type=SEED, help="repeat the noise that chunks begin with (default: new noise each time)")
    budget(
        "--deadline-ms",
        type=DEADLINE_MS,
        metavar="MS",
        help="milliseconds for a chunk, with reading its frames. Chooses the largest budget that is expected in time "
        "with --min-steps, and as many steps as fit. Measures what budgets cost here first, unless that is known",
    )
    budget(
        "--warm-up",
        action="store_true",
        help="measure the costs of chunks on this machine, also where they are known, and keep them for later runs; "
        "takes seconds, or minutes for a large policy",
    )
    add_costs(
        parser,
        "costs of chunks on this machine, from write_costs in Python (default: those that an earlier run kept, or "
        "else measured ones)",
    )
    budget(
        "--min-steps",
        type=STEPS.named("--min-steps"),
        metavar="N",
        help="the fewest denoising steps with --deadline-ms, before a smaller budget is taken (default: 5, or fewer "
        "--steps)",
    )
    _add_loop_options(parser)
    parser.group("output").add_argument(
        "--overlay", type=Path, metavar="FILE.png", help="draw each camera's kept and dropped tokens, in one picture"
    )
    parser.add_json("the actions and their figures")
    return parser.parse(arguments, Options)


def _add_loop_options(parser: Any) -> None:
    add = parser.add_argument
    add(
        "--rate",
        type=RATE_HZ.named("--rate"),
        metavar="HZ",
        help="play the folders' moments at this rate, one a tick, and send an action a tick while the next chunk is "
        "computed, as PolicyLoop does on a robot",
    )
    add("--join", choices=JOINS, help="with --rate: how a new chunk joins the one that runs (default: switch)")
    add(
        "--execution-horizon",
        type=HORIZON.named("--execution-horizon"),
        metavar="TICKS",
        help="with --rate: ticks between the frames of two chunks, at least (default: 1)",
    )
    add(
        "--max-age-ms",
        type=MAX_AGE_MS.named("--max-age-ms"),
        metavar="MS",
        help="with --rate: stop at an action whose frame is older (default: 1000)",
    )


def _check_combinations(options: Options, observations: Observations) -> None:
    if options.min_steps is not None and options.deadline_ms is None:
        raise UsageError("--min-steps is for a deadline, and there is none. Add --deadline-ms.")
    check_cost_options(options.warm_up, options.costs, options.deadline_ms)
    if options.rate is None:
        for name in _OF_LOOP:
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --rate, which is not given. Add --rate.")
    else:
        if len(observations.moments) < 2:
            raise UsageError(
                "--rate plays recorded moments, and there is one. Give a folder of frames for each camera."
            )
        for name in ("overlay", "seed"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for single chunks, and --rate computes many. Leave one out.")
    if options.overlay and options.budget == UNPRUNED and options.deadline_ms is None:
        raise UsageError("--overlay draws what pruning kept. Give a --budget other than none, or --deadline-ms.")
    if options.overlay and len(observations.moments) > 1:
        raise UsageError(
            f"--overlay draws one chunk, and there are {len(observations.moments)} moments. Give a file for each "
            "camera, not a folder."
        )


def _open(options: Options, observations: Observations) -> tuple[Bundle, Observations, list[str]]:
    """Return the bundle, the observations in the order of its cameras, and notes that were printed; loads nothing."""
    bundle = read_runnable(options.bundle, options.trust)
    manifest = bundle.manifest
    check_kind(bundle, acts=True)
    manifest.plan(options.method, options.budget)
    observations = observations.for_policy(manifest.acting)
    notes = observations.check(manifest, options.instruction, steps=options.steps)
    if options.min_steps is not None:
        check_least_steps(options.min_steps, options.steps or manifest.acting.steps, "--min-steps", "--steps")
    return bundle, observations, notes


def _usable_costs(options: Options, bundle: Bundle, frames: int) -> ActionCosts | None:
    """Return the costs of `--costs`, or kept ones, before anything is loaded; None if they must be measured."""
    place = place_here(options, bundle)
    if options.warm_up:
        return None
    file = options.costs
    costs = ActionCosts.read(file, place) if file else ActionCosts.cached(place, options.method)
    if costs is None:
        return None
    try:
        check_costs(costs, bundle.manifest, options.method, options.budget, frames)
    except DeadlineError:
        if options.costs:
            raise
        return None
    return costs


def _prepare(
    policy: Policy, costs: ActionCosts | None, moment: Moment, layouts: Sequence[VisualLayout], options: Options
) -> None:
    """Give the policy its `costs`, or measure them; and run it once, because a process's first chunk is slower."""
    given = list(moment.cameras), options.instruction, moment.state
    if costs is None:
        with explain_interrupt(NO_COSTS), status(MEASURING_COSTS) as progress:
            policy.warm_up(*given, budget=options.budget, method=options.method, progress=progress)
        return
    policy.costs = costs
    with status("loading the budgets' graphs") as progress:
        policy.load_plans(options.method, progress)
    with status("running a chunk once before it counts"):
        for budget in first_budgets(policy.bundle.manifest, policy.backend, options.method, options.budget, layouts):
            policy.act(*given, method=options.method, budget=budget, steps=1)


def _line(chunk: ActionReport, number: int, total: int) -> str:
    ms, numbers = chunk.ms, chunk.actions[0]
    shown = {"preprocess": "preprocess", "vision": "vision", "prefix": "prefill", "expert": "expert"}
    parts = ", ".join(f"{name} {ms[part]:.0f}" for name, part in shown.items())
    of = f"{number}/{total} " if total > 1 else ""
    more = ", ..." if len(numbers) > _SHOWN else ""
    return (
        f"{of}[{chunk.budget}] TTFA {ms['latency']:.0f} ms ({parts}), {1e3 / ms['latency']:.2f} Hz, "
        f"{counted(chunk.steps, 'step')}; visual tokens {chunk.visual_tokens} -> {chunk.tokens_per_layer[0]} -> "
        f"{chunk.tokens_per_layer[-1]}; first of {counted(len(chunk.actions), 'action')}: "
        + ", ".join(f"{value:.4g}" for value in numbers[:_SHOWN])
        + f"{more}\n"
    )


def _met(chunks: Sequence[ActionReport]) -> str:
    reports = [chunk.deadline for chunk in chunks if chunk.deadline is not None]
    last, met = reports[-1], sum(each.met for each in reports)
    return (
        f"{met} of {counted(len(reports), 'chunk')} in time; the last took {last.measured_ms:.0f} ms with reading "
        f"frames, expected {last.expected_ms:.0f} ms; {last.reason}"
    )


def _draw(path: Path, chunk: ActionReport, moment: Moment, instruction: str) -> None:
    if chunk.budget == UNPRUNED:
        sys.stderr.write(f"note: --overlay drew nothing, because budget {UNPRUNED} ran, which drops no tokens.\n")
        return
    write_output(path, picture_bytes(overlay(chunk, moment.cameras, instruction), path))


def _loop_lines(report: LoopReport) -> str:
    late, age, chunk = report.lateness_ms, report.frame_age_ms, report.chunk_ms
    return (
        f"{counted(report.ticks, 'tick')} at {report.rate_hz:g} Hz, late by {late.quantile(0.5):.2f} ms (median), "
        f"{late.quantile(0.99):.2f} ms (p99), {late.largest:.2f} ms (most); {report.missed_ticks} missed, "
        f"{'with' if report.real_time else 'without'} real-time priority\n"
        f"{counted(report.chunks, 'chunk')} by {report.join}: {chunk.quantile(0.5):.0f} ms each (median), "
        f"{chunk.quantile(0.99):.0f} ms (p99); {report.late_chunks} late, which held the arm for "
        f"{counted(report.held_ticks, 'tick')}; {counted(report.dropped_actions, 'action')} past and dropped\n"
        f"the frame behind an action: {age.quantile(0.5):.0f} ms old (median), {age.quantile(0.99):.0f} ms (p99)\n"
    )


def late_chunks_line(deadlines: Sequence[ActionDeadline]) -> str:
    """Return a warning for the late ones of some chunks, and nothing where all were in time."""
    late = [each for each in deadlines if not each.met]
    if not late:
        return ""
    last = late[-1]
    soonest = "" if last.can_meet else f"a chunk sooner than in {last.expected_ms:.0f} ms"
    found = f"{len(late)} of {len(deadlines)} chunks; the last of them: " if len(deadlines) > 1 else ""
    return f"late: {found}{how_late(last, soonest)}\n"
