"""The arm's loop, on a clock that jumps: no test sleeps."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import NumericsError, Policy, UsageError
from sinkprune.contract.precision import Array
from sinkprune.policies.loop import ActionLimits, ActionPlan, Histogram, LoopFault, LoopReport, Observed, PolicyLoop
from sinkprune.runtime.backends import Backend, Engine
from support.references.pi0 import INSTRUCTION
from support.stand_ins.virtual_clock import VirtualClock

RATE, CHUNK = 10.0, 20


class Robot:
    """A robot whose state is the time, and which notes what it is sent."""

    def __init__(self, clock: VirtualClock, frame_s: float = 0.02) -> None:
        self.clock, self.frame_s = clock, frame_s
        self.sent: list[tuple[float, Array]] = []

    def observe(self) -> Observed:
        self.clock.wait(self.clock.now() + self.frame_s)
        return Observed([], [self.clock.now()])

    def send(self, action: Array) -> None:
        self.sent.append((self.clock.now(), action))


class Thinker:
    """A policy that takes its time. Its action i is [when it was asked, i]."""

    def __init__(self, clock: VirtualClock, seconds: float = 0.33, most_held: int | None = None) -> None:
        self.clock, self.seconds, self.facts = clock, seconds, SimpleNamespace(most_held=most_held, expert=True)
        self.asked: list[float] = []
        self.held: list[Array | None] = []

    def act(self, cameras: Any, instruction: str, state: Any, **options: Any) -> Any:
        asked = self.clock.now()
        self.asked.append(asked)
        self.held.append(options["held"])
        self.clock.wait(asked + self.seconds)
        return SimpleNamespace(actions=np.array([[asked, place] for place in range(CHUNK)]))


class Arm:
    """A robot and a policy on one clock."""

    def __init__(self, thinks: float = 0.33, most_held: int | None = None) -> None:
        self.clock = VirtualClock()
        self.robot, self.thinker = Robot(self.clock), Thinker(self.clock, thinks, most_held)

    def loop(self, **options: Any) -> PolicyLoop:
        options = {"rate_hz": RATE, "join": "switch", "clock": self.clock, **options}
        return PolicyLoop(self.thinker, self.robot.observe, self.robot.send, "go", **options)  # type: ignore[arg-type]


def ran(seconds: float = 5.0, *arm: Any, **options: Any) -> tuple[LoopReport, Robot, Thinker]:
    """The report of a loop of an `Arm` with these arguments."""
    own = Arm(*arm)
    return own.loop(**options).run(seconds), own.robot, own.thinker


def test_every_tick_sends_the_newest_chunks_action_for_its_time() -> None:
    report, robot, thinker = ran()
    times = np.array([time for time, _ in robot.sent])
    np.testing.assert_allclose(np.diff(times), 1 / RATE, atol=1e-9)
    assert report.ticks == len(times) == 50 and report.missed_ticks == report.held_ticks == 0
    first = thinker.asked[0]
    for time, (asked, place) in robot.sent:
        # The arm stands still until the first chunk, whose first action is for the first tick.
        begins = times[0] if asked == first else times[np.searchsorted(times, asked - 1e-9)]
        assert place == pytest.approx((time - begins) * RATE, abs=1e-6)
        arrived = [own for own in thinker.asked if own + thinker.seconds <= time + 1e-9]
        assert asked == arrived[-1]
    assert report.chunks > 10 and report.dropped_actions > 0 and report.fault is None
    assert report.frame_age_ms.largest < 1e3 * (2 * thinker.seconds + 3 / RATE)
    assert report.lateness_ms.largest < 1e-6


def test_a_late_chunk_holds_the_last_action() -> None:
    report, robot, _ = ran(12, 1.2, max_age_ms=10_000)
    pairs = zip(robot.sent, robot.sent[1:], strict=False)
    held = [second for (_, first), (_, second) in pairs if all(first == second)]
    assert report.held_ticks == len(held) > 0
    assert 0 < report.late_chunks <= report.chunks and report.fault is None
    assert all(action[1] == CHUNK - 1 for action in held)


def test_ticks_have_real_time_priority_where_the_system_permits_it_and_the_policy_does_not() -> None:
    arm, found, act = Arm(), dict[str, int](), Thinker.act

    def schedule(*_: Any) -> None:
        found["send"] = os.sched_getscheduler(0)

    def acts(*given: Any, **options: Any) -> Any:
        found["act"] = os.sched_getscheduler(0)
        return act(arm.thinker, *given, **options)

    def may() -> None:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        found["may"] = os.sched_getscheduler(0)

    trying = Thread(target=may)
    trying.start()
    trying.join()
    before = os.sched_getscheduler(0)
    arm.robot.send, arm.thinker.act = schedule, acts  # type: ignore[method-assign]
    report = arm.loop().run(1)
    assert report.real_time == (found["may"] == os.SCHED_FIFO)
    assert found["send"] & ~os.SCHED_RESET_ON_FORK == found["may"]
    assert found["act"] == os.SCHED_OTHER
    assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == before & ~os.SCHED_RESET_ON_FORK


def test_a_policy_slower_than_its_chunks_is_named() -> None:
    report, _, _ = ran(60, 2.55, max_age_ms=9_000)
    assert report.fault is not None and report.fault.kind == "stale frame"
    assert "took longer than its 20 actions at 10 Hz" in report.fault.message
    assert report.dropped_actions == (report.chunks - 1) * CHUNK


@pytest.mark.parametrize("join", ["switch", "blend"])
def test_a_plan_joins_chunks_and_drops_what_is_past(join: Any) -> None:
    plan = ActionPlan(join)
    old, new = np.arange(6.0)[:, None], 100 + np.arange(6.0)[:, None]
    assert plan.add(old, 0, 1.0, 0) == 0
    assert [float(plan.take(tick).action[0]) for tick in (0, 1)] == [0, 1]  # type: ignore[union-attr]
    # For ticks 1 to 6; tick 1 is past, and ticks 2 to 5 have both.
    assert plan.add(new, 1, 2.0, 2) == 1
    expected = [101.0, 102, 103, 104, 105]
    if join == "blend":
        expected[:4] = [0.2 * 101 + 0.8 * 2, 0.4 * 102 + 0.6 * 3, 0.6 * 103 + 0.4 * 4, 0.8 * 104 + 0.2 * 5]
    coming = plan.coming(2, 9)
    assert coming is not None
    np.testing.assert_allclose(coming[:, 0], expected)
    assert plan.coming(7, 3) is None
    taken = plan.take(6)
    assert taken is not None and (taken.action[0], taken.taken) == (105, 2.0)
    assert plan.take(5) is None, "earlier ticks are forgotten"
    assert plan.add(new, 0, 3.0, 50) == 6
    # A chunk that arrives between a tick and its sending leaves that tick its action.
    early = ActionPlan(join)
    early.add(old, 0, 1.0, 0)
    early.add(new, 1, 2.0, 3)
    assert early.take(2).action[0] == 2  # type: ignore[union-attr]


def test_inpainting_holds_what_will_run_until_the_chunk_can_arrive() -> None:
    _, robot, thinker = ran(join="inpaint")
    assert thinker.held[:2] == [None, None]
    sent = {round(time, 6): action for time, action in robot.sent}
    for asked, held in zip(thinker.asked[2:-2], thinker.held[2:], strict=False):
        # A chunk takes 3.3 ticks: four are held, and three surely run.
        assert held is not None and len(held) == 4
        ticks = sorted(time for time in sent if time >= asked - 1e-6)[:3]
        np.testing.assert_allclose(np.stack([sent[tick] for tick in ticks]), held[:3])


@pytest.mark.parametrize("join", ["inpaint", "trained"])
def test_no_more_is_held_than_in_the_training(join: Any) -> None:
    report, _, thinker = ran(5, 0.33, 2, join=join)
    assert report.fault is None and {len(held) for held in thinker.held[2:] if held is not None} == {2}


def broken(after: int, own: Callable[..., Any], what: Callable[[], Any]) -> Callable[..., Any]:
    """Return `own`, which does `what` from its call `after` on."""
    calls = iter(range(10**6))
    return lambda *given, **options: what() if next(calls) >= after else own(*given, **options)


def boom() -> None:
    raise RuntimeError("the cable is out")


def overflow() -> None:
    raise NumericsError("not finite")


NAN = np.full((CHUNK, 2), math.nan)
FAULTS: dict[str, tuple[str, str, Callable[[], Any], str, str]] = {
    "camera ends": ("robot", "observe", lambda: None, "observe", "its cameras ended"),
    "camera fails": ("robot", "observe", boom, "observe", "RuntimeError: the cable is out"),
    "policy fails": ("thinker", "act", boom, "act", "RuntimeError: the cable is out"),
    "policy overflows": ("thinker", "act", overflow, "not finite", "not finite"),
    "action is nan": ("thinker", "act", lambda: SimpleNamespace(actions=NAN), "not finite", "is \\[nan, nan\\]"),
    "arm fails": ("robot", "send", boom, "send", "RuntimeError: the cable is out"),
    "frame is old": ("robot", "observe", lambda: Observed([], [0.0], 0.0), "stale frame", "the limit is 1000 ms"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("after", [0, 3])
def test_a_fault_stops_sending_and_is_reported(name: str, after: int) -> None:
    who, where, what, kind, message = FAULTS[name]
    arm, faults = Arm(), list[LoopFault]()
    owner = getattr(arm, who)
    setattr(owner, where, broken(after, getattr(owner, where), what))
    report = arm.loop(on_fault=faults.append).run(20)
    assert faults == [report.fault] and report.fault is not None
    assert report.fault.kind == report.as_json()["fault"]["kind"] == kind
    assert re.search(message, report.fault.message)
    assert report.ticks == len(arm.robot.sent) <= report.fault.tick


@pytest.mark.parametrize(("who", "where"), [("robot", "observe"), ("thinker", "act")])
def test_what_hangs_ends_in_a_stale_frame(who: str, where: str) -> None:
    arm, faulted = Arm(), list[float]()
    clock, owner = arm.clock, getattr(arm, who)
    setattr(owner, where, broken(2, getattr(owner, where), lambda: clock.wait(clock.now() + 60)))
    loop = arm.loop(max_age_ms=1500, on_fault=lambda fault: faulted.append(clock.now()))
    report = loop.run(30)
    assert report.fault is not None and report.fault.kind == "stale frame"
    assert report.frame_age_ms.largest <= 1500
    # `on_fault` comes before the loop waits for what hangs.
    assert clock.now() - faulted[0] >= 9
    with pytest.raises(UsageError, match="still hangs"):
        loop.run(1)
    clock.wait(clock.now() + 100)
    assert report.held_ticks == 0 or report.late_chunks == 1


def test_a_busy_arm_misses_ticks_and_gets_no_action_of_the_past() -> None:
    arm = Arm()
    clock, robot, plain = arm.clock, arm.robot, arm.robot.send

    def send(action: Array) -> None:
        plain(action)
        if len(robot.sent) == 10:
            clock.wait(clock.now() + 0.35)

    robot.send = send  # type: ignore[method-assign]
    report = arm.loop().run(5)
    assert report.missed_ticks == 2 and report.ticks == 48
    times = np.array([time for time, _ in robot.sent])
    ticks = (times - times[0]) * RATE
    np.testing.assert_allclose(ticks - np.floor(ticks + 1e-6), np.where(np.arange(48) == 10, 0.5, 0), atol=1e-6)


def test_a_first_chunk_that_is_too_slow_is_followed_by_a_second() -> None:
    arm = Arm(5.0)
    report = arm.loop(on_chunk=lambda report: setattr(arm.thinker, "seconds", 0.33)).run(3)
    assert report.fault is None and report.ticks == 30
    report, _, _ = ran(3, 5.0)
    assert report.fault is not None and report.fault.kind == "stale frame" and report.chunks == 2


def test_a_run_ends_after_its_last_chunk() -> None:
    """Otherwise a process could end while an engine runs."""
    report, _, thinker = ran(0.5, 5.0, max_age_ms=60_000)
    assert report.ticks == 5 and report.chunks == len(thinker.asked) == 2


def test_a_horizon_keeps_chunks_apart_and_hold_makes_the_missing_actions() -> None:
    _, _, thinker = ran(5, 0.01, execution_horizon=7)
    gaps = np.diff(thinker.asked[1:]) * RATE
    assert (gaps >= 7).all() and (gaps < 8.1).all()
    report, robot, _ = ran(12, 1.2, max_age_ms=10_000, hold=np.zeros_like)
    assert sum(not action.any() for _, action in robot.sent) == report.held_ticks > 0
    report, robot, _ = ran(12, 1.2, max_age_ms=10_000, hold=lambda last: 1 / 0)
    assert report.fault is not None and report.fault.kind == "hold"
    assert report.held_ticks == 0 and report.ticks == len(robot.sent) == report.fault.tick


def test_limits_bound_range_and_change() -> None:
    limits = ActionLimits(np.array([-1.0, 0.0]), np.array([1.0, 2.0]), np.array([0.5, 0.5]))
    np.testing.assert_array_equal(limits.applied(np.array([3.0, -1.0]), None), [1, 0])
    np.testing.assert_array_equal(limits.applied(np.array([1.0, 2.0]), np.array([0.0, 1.8])), [0.5, 2])
    report, robot, _ = ran(
        seconds=3, limits=ActionLimits(np.array([0.0, 0.0]), np.array([1e9, 4.0]), np.array([1e9, 1.0]))
    )
    actions = np.stack([action for _, action in robot.sent])
    assert actions[:, 1].max() <= 4 and np.abs(np.diff(actions[:, 1])).max() <= 1
    assert 0 < report.limited_actions < report.ticks


def test_a_loop_stops_when_it_is_told_and_runs_again() -> None:
    arm = Arm()
    loop = arm.loop(on_chunk=lambda report: loop.stop() if len(arm.thinker.asked) % 3 == 0 else None)
    for _ in range(2):
        report = loop.run()
        assert report.fault is None and 0 < report.ticks < 30


def test_wrong_options_are_refused() -> None:
    for options, message in (
        ({"join": "glue"}, "join is 'glue', expected switch, blend, inpaint, trained"),
        ({"join": "trained"}, "join is 'trained', and the policy's checkpoint was not trained with held actions"),
        ({"rate_hz": 0}, "rate_hz is 0"),
        ({"max_age_ms": math.nan}, "max_age_ms is nan"),
    ):
        with pytest.raises(UsageError, match=message):
            Arm().loop(**options)


def test_quantiles_are_within_one_percent() -> None:
    values = np.random.default_rng(3).lognormal(1, 2, 20_000)
    histogram = Histogram()
    for value in values:
        histogram.add(float(value))
    for share in (0.5, 0.99, 0.999, 1.0):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert exact * 0.999 <= histogram.quantile(share) <= exact * 1.0101
    assert Histogram().quantile(0.5) == 0


def test_held_actions_have_their_noised_values_in_each_step(bundle: Callable[..., Path], photo: Image.Image) -> None:
    """Against the definition: the first rows of the expert's input at time t are t*noise + (1-t)*held."""
    calls: list[tuple[Array, Array]] = []

    def wrap(graph: str, engine: Engine, backend: Backend) -> Engine:
        def noted(inputs: Any) -> Any:
            outputs = engine(inputs)
            calls.append((backend.numpy(inputs["actions"]).copy(), backend.numpy(outputs["actions_out"]).copy()))
            return outputs

        return noted if graph == "expert" else engine

    policy = Policy.load(bundle("pi0", budgets=("prune-77.8",), max_images=2), threads=1, wrap=wrap)
    state, facts = policy.facts.usual_state, policy.facts
    noise = np.random.default_rng(5).standard_normal((facts.chunk, facts.action_dim), np.float32)
    given: dict[str, Any] = {"budget": "prune-77.8", "steps": 4, "noise": noise}
    plain = policy.act([photo, None], INSTRUCTION, state, **given).actions
    held = plain[1:3] + 0.25
    calls.clear()
    found = policy.act([photo, None], INSTRUCTION, state, held=held, **given).actions
    np.testing.assert_allclose(found[:2], held, atol=1e-5)
    assert np.abs(found[2:] - plain[2:]).max() > 1e-4
    # The held actions in the expert's own numbers.
    (first, _), (second, _), *_ = calls
    target = (second[0, :2] - 0.75 * noise[:2]) / 0.25
    np.testing.assert_array_equal(first[0], noise)
    for number, (inputs, _) in enumerate(calls):
        time = 1 - number / 4
        np.testing.assert_allclose(inputs[0, :2], time * noise[:2] + (1 - time) * target, atol=1e-5)
    # Rows that are not held go on where the last step ended.
    for (inputs, _), (_, before) in zip(calls[1:], calls, strict=False):
        np.testing.assert_array_equal(inputs[0, 2:], before[0, 2:])
    for wrong in (held[:, :-1], np.full_like(held, np.nan), np.zeros((facts.chunk, held.shape[1]))):
        with pytest.raises(UsageError, match="held"):
            policy.act([photo, None], INSTRUCTION, state, held=wrong, **given)
