"""`sinkprune-act --rate`: a policy's loop over recorded moments, at the rate of an arm that is not there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sinkprune.contract.checks import counted
from sinkprune.contract.errors import SinkpruneError, UsageError
from sinkprune.contract.precision import Array
from sinkprune.policies.loop import HORIZON, JOINS, MAX_AGE_MS, RATE_HZ, LoopReport, Observed, PolicyLoop
from sinkprune.policies.options import Moment
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.media.images import read_image


def add_loop_options(parser: Any) -> None:
    """Add `--rate` and the options that need it."""
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


def check_loop_options(options: Options, moments: Sequence[Moment]) -> None:
    """Raise `UsageError` for options of the loop without `--rate`, and for a rate without moments."""
    if options.rate is None:
        for name in ("join", "execution_horizon", "max_age_ms"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --rate, which is not given. Add --rate.")
        return
    if len(moments) < 2:
        raise UsageError("--rate plays recorded moments, and there is one. Give a folder of frames for each camera.")
    for name in ("overlay", "seed"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} is for single chunks, and --rate computes many. Leave one out.")


class RecordedArm:
    """An arm that plays its recorded moments, one a tick from the first action on, and notes what it is sent."""

    def __init__(self, moments: Sequence[Moment], rate: float) -> None:
        # Decoded before, as a camera's driver does it.
        self._moments = [
            ([None if path is None else read_image(path) for path in one.cameras], one.state) for one in moments
        ]
        self._rate, self._began = rate, 0.0
        self.actions: list[list[float]] = []

    def observe(self) -> Observed:
        """Return the moment of now."""
        place = int((time.monotonic() - self._began) * self._rate) if self.actions else 0
        cameras, state = self._moments[min(place, len(self._moments) - 1)]
        return Observed(cameras, state, time.monotonic())

    def send(self, action: Array) -> None:
        """Note an action."""
        if not self.actions:
            self._began = time.monotonic()
        self.actions.append(action.tolist())


def rehearse(policy: Policy, moments: Sequence[Moment], options: Options) -> tuple[LoopReport, list[list[float]]]:
    """Run the loop over all moments; returns its report and the action of each tick."""
    arm = RecordedArm(moments, options.rate)
    names = ("join", "execution_horizon", "max_age_ms")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    loop = PolicyLoop(
        policy,
        arm.observe,
        arm.send,
        options.instruction,
        rate_hz=options.rate,
        budget=options.budget,
        method=options.method,
        steps=options.steps,
        deadline_ms=options.deadline_ms,
        min_steps=options.min_steps,
        **given,
    )
    return loop.run(len(moments) / options.rate), arm.actions


def loop_lines(report: LoopReport) -> str:
    """Return what a loop did, in lines."""
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


def raise_fault(report: LoopReport) -> None:
    """Raise `SinkpruneError` where a fault ended the loop."""
    fault = report.fault
    if fault is None:
        return
    message = f"the loop stopped at tick {fault.tick} ({fault.kind}): {fault.message}"
    if fault.error is not None and not isinstance(fault.error, SinkpruneError):
        raise fault.error
    raise SinkpruneError(message) from fault.error
