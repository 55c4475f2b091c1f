"""An arm's loop: one action a tick at a fixed rate, while the next chunk is computed from newer frames.

Two threads run. The caller's sends an action each tick, and never waits for the policy. A second one observes and
computes chunks, one after the other. Action i of a chunk is for the first tick after its observation, plus i.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import RealNumber, WholeNumber, check_callable, checks_options, format_value
from sinkprune.contract.errors import NumericsError, UsageError
from sinkprune.contract.policy_facts import PolicyFacts
from sinkprune.contract.precision import Array
from sinkprune.policies.observation import Cameras
from sinkprune.policies.policy import Policy
from sinkprune.policies.report import ActionReport

Join = Literal["switch", "blend", "inpaint", "trained"]
"""How a new chunk joins the one that runs.

`switch`: its actions replace the old ones. `blend`: the weight of the new ones rises evenly over the ticks that both
have. `inpaint`: actions that will run before the chunk can arrive are held in its denoising, so that it continues
them (real-time chunking, arXiv 2506.07339, without its gradient). `trained`: they are held as in the training of the
checkpoint (arXiv 2512.05964), as many as there at most.
"""
JOINS = get_args(Join)
HORIZON = WholeNumber("execution_horizon", 1, 10_000)
RATE_HZ = RealNumber("rate_hz", 0.1, 1000, "0.1 to 1000 ticks a second")
MAX_AGE_MS = RealNumber("max_age_ms", 1, 3_600_000, "milliseconds, from 1 to 3600000 (an hour)")
_DELAYS = 20
"""The last chunks, whose longest delay is expected of the next."""
_SWITCH_S = 5e-4
"""Python's threads change after so many seconds while a loop runs. Its usual 5 ms would make a tick as late."""
_PRIORITY = 1
"""The lowest of Linux's real-time priorities, so that a driver's threads come first."""
_POLL_S = 0.01
_HANGS_S = 10.0
"""How long the end of a run waits for a chunk. What hangs for longer keeps its thread."""
_FIRST_CHUNK_S = 600.0
"""How long the first chunk may take, for which engines may compile."""


class Clock(Protocol):
    """The time of a loop, in seconds from any start."""

    def now(self) -> float:
        """Return the time."""

    def wait(self, until: float) -> None:
        """Return at the time `until`, or at once after it."""


class _SystemClock(Clock):
    now = staticmethod(time.monotonic)

    def wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)


class Observed(NamedTuple):
    """What a robot sees and measures at one time."""

    cameras: Cameras
    """As `Policy.act` takes them."""
    state: Sequence[float] | Array
    taken: float | None = None
    """When the oldest frame was taken, by `time.monotonic`; None for the time at which `observe` was called."""


class ActionLimits(NamedTuple):
    """What an action may be: numbers [width] in the robot's units. Others are limited, and counted."""

    low: Array
    high: Array
    most_change: Array | None = None
    """The largest change from one tick to the next."""

    @classmethod
    def of(cls, facts: PolicyFacts, most_change: Array | None = None) -> ActionLimits:
        """Return the range of the checkpoint's statistics: its bounds, or four standard deviations from the mean.

        Raises `UsageError` for a policy without statistics, or with statistics of relative actions.
        """
        if facts.relative_actions:
            raise UsageError(
                "the policy's statistics are of actions relative to the state, so the actions have no known range. "
                "Give the limits."
            )
        if facts.action_range:
            return cls(np.array(facts.action_range.low), np.array(facts.action_range.high), most_change)
        if not facts.action_mean:
            raise UsageError("the policy has no statistics of actions, so they have no known range. Give the limits.")
        mean, std = np.array(facts.action_mean), np.array(facts.action_std)
        return cls(mean - 4 * std, mean + 4 * std, most_change)

    def applied(self, action: Array, last: Array | None) -> Array:
        """Return `action` [width] within the limits, `last` being the action before."""
        found = np.clip(action, self.low, self.high)
        if self.most_change is not None and last is not None:
            found = np.clip(found, last - self.most_change, last + self.most_change)
        return found


FaultKind = Literal["stale frame", "not finite", "observe", "act", "hold", "send"]
"""Why a loop stopped: the frame behind an action is older than `max_age_ms` (also where a camera or the policy
hangs), numbers of an action are not finite, or an error of `observe`, the policy, `hold` or `send`."""


@dataclass(frozen=True)
class LoopFault:
    """Why a loop stopped sending."""

    kind: FaultKind
    message: str
    tick: int
    """The first tick without an action."""
    error: BaseException | None = None


class Histogram:
    """Quantiles of any number of positive values, to 1 %, in fixed memory."""

    _LEAST, _GROWTH, _BINS = 1e-3, 1.01, 3000

    def __init__(self) -> None:
        self._counts, self.largest = np.zeros(self._BINS, np.int64), 0.0

    def add(self, value: float) -> None:
        """Count a value. Those below 0.001 count as 0.001."""
        place = math.ceil(math.log(max(value, self._LEAST) / self._LEAST, self._GROWTH))
        self._counts[min(place, self._BINS - 1)] += 1
        self.largest = max(self.largest, value)

    def quantile(self, share: float) -> float:
        """Return the value that a `share` of all values does not exceed; 0 without values."""
        total = int(self._counts.sum())
        if not total:
            return 0.0
        place = int(np.searchsorted(np.cumsum(self._counts), math.ceil(share * total)))
        return min(self._LEAST * self._GROWTH**place, self.largest)

    def as_json(self) -> dict[str, float]:
        """Return median, 99th and 99.9th percentile and largest value."""
        shares = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}
        return {name: self.quantile(share) for name, share in shares.items()} | {"max": self.largest}


class _Planned(NamedTuple):
    action: Array
    taken: float
    """When the frames behind it were taken."""


class ActionPlan:
    """The actions of coming ticks. Any thread may use it."""

    def __init__(self, join: Join) -> None:
        self._join, self._lock = join, threading.Lock()
        self._planned: dict[int, _Planned] = {}

    def add(self, actions: Array, first: int, taken: float, now: int) -> int:
        """Join a chunk [n,width], whose first action is for tick `first`; returns how many actions were past.

        `now` is the first tick that is not past.
        """
        past = min(len(actions), max(0, now - first))
        with self._lock:
            both = [tick for tick in range(first + past, first + len(actions)) if tick in self._planned]
            new = {first + place: _Planned(actions[place], taken) for place in range(past, len(actions))}
            if self._join == "blend":
                for place, tick in enumerate(both, 1):
                    weight = place / (len(both) + 1)
                    mixed = weight * new[tick].action + (1 - weight) * self._planned[tick].action
                    new[tick] = _Planned(mixed, taken)
            # The tick that is due now may not have been taken yet.
            earlier = {tick: own for tick, own in self._planned.items() if tick < first + past}
            self._planned = earlier | new
        return past

    def coming(self, first: int, most: int) -> Array | None:
        """Return the actions [n,width] of tick `first` and those after it, `most` at most; None for none."""
        with self._lock:
            found: list[Array] = []
            while len(found) < most and first + len(found) in self._planned:
                found.append(self._planned[first + len(found)].action)
        return np.stack(found) if found else None

    def take(self, tick: int) -> _Planned | None:
        """Return the action of a tick, and forget those before."""
        with self._lock:
            for earlier in [own for own in self._planned if own < tick]:
                del self._planned[earlier]
            return self._planned.pop(tick, None)


@dataclass
class LoopReport:
    """What a loop did. Times are in milliseconds."""

    rate_hz: float
    join: Join
    ticks: int = 0
    """Ticks that sent an action."""
    missed_ticks: int = 0
    """Ticks that sent nothing, because `send` or the machine was busy for longer than a tick."""
    held_ticks: int = 0
    """Ticks whose action was made by `hold`, because the next chunk was late."""
    late_chunks: int = 0
    """How often that began."""
    chunks: int = 0
    dropped_actions: int = 0
    """Actions whose tick was past when their chunk arrived."""
    limited_actions: int = 0
    """Actions that were beyond the limits."""
    lateness_ms: Histogram = field(default_factory=Histogram)
    """How late ticks were: the `median`, `p99`, `p99.9` and `max`, as of the next two."""
    frame_age_ms: Histogram = field(default_factory=Histogram)
    """The age of the frame behind each action when it was sent."""
    chunk_ms: Histogram = field(default_factory=Histogram)
    """From an observation to the arrival of its chunk, without the first."""
    real_time: bool = False
    """Whether the system let the ticks run before other programs (Linux's `SCHED_FIFO`)."""
    fault: LoopFault | None = None
    """Why the loop stopped: its `kind`, `message` and `tick`; None where it ran to its end."""

    def as_json(self) -> dict[str, Any]:
        """Return all figures, for `json.dumps`."""
        fault = self.fault and {name: getattr(self.fault, name) for name in ("kind", "message", "tick")}
        times = {name: own.as_json() for name, own in vars(self).items() if isinstance(own, Histogram)}
        return {**vars(self), **times, "fault": fault}


class PolicyLoop:
    """Drives an arm with a policy at a fixed rate.

        loop = PolicyLoop(policy, robot.observe, robot.send, "pick up the cup", rate_hz=50, budget="prune-80")
        report = loop.run(seconds=60)

    `observe` returns the newest frames and state; a second thread calls it. `send` gets the action [width] of a tick
    and must return within the tick. Nothing is sent before a chunk is in time. An action of the past is dropped.
    Where the next chunk is late, `hold` makes the action from the last one.

    A loop stops sending, and calls `on_fault`, at a frame older than `max_age_ms` behind an action, at an action that
    is not finite, and at any error of `observe`, the policy, `hold` or `send`. It does not move the arm to safety:
    `on_fault` may.

    The thread that calls `run` gets real-time priority until `run` ends, where the system permits it: on Linux for
    root, with `CAP_SYS_NICE`, or with a limit `rtprio`. One that has a real-time priority keeps it.
    """

    @checks_options
    def __init__(
        self,
        policy: Policy,
        observe: Callable[[], Observed],
        send: Callable[[Array], object],
        instruction: str,
        *,
        rate_hz: float,
        join: Join = "switch",
        execution_horizon: int = 1,
        hold: Callable[[Array], Array] = lambda last: last,
        budget: str = UNPRUNED,
        method: str = "sinkpruner",
        steps: int | None = None,
        deadline_ms: float | None = None,
        min_steps: int | None = None,
        order: str = "rgb",
        limits: ActionLimits | None = None,
        max_age_ms: float = 1000.0,
        on_fault: Callable[[LoopFault], object] = lambda fault: None,
        on_chunk: Callable[[ActionReport], object] = lambda report: None,
        clock: Clock | None = None,
    ) -> None:
        """Take what `Policy.act` takes.

        At least `execution_horizon` ticks are between the frames of two chunks: a policy whose first actions hardly
        move needs several. `hold` makes the action of a tick without a new one from the last: the same is right for
        positions, `np.zeros_like` for movements. `on_chunk` gets the report of each chunk, in the second thread.

        Raises `UsageError` for numbers out of range, for a way to join that does not exist, and for `trained` with a
        policy that was not trained with held actions; and `TypeError`.
        """
        if join not in JOINS:
            raise UsageError(f"join is {format_value(join)}, expected {', '.join(JOINS)}.")
        if join in ("inpaint", "trained") and policy.facts.expert is None:
            raise UsageError(
                f"join is '{join}', which continues the running chunk in its denoising, and this policy has none. "
                "Take another."
            )
        if join == "trained" and not policy.facts.most_held:
            raise UsageError(
                "join is 'trained', and the policy's checkpoint was not trained with held actions (LeRobot's "
                "rtc_training_max_delay). Take 'inpaint'."
            )
        called = {"observe": observe, "send": send, "hold": hold, "on_fault": on_fault, "on_chunk": on_chunk}
        for name, function in called.items():
            check_callable(name, function)
        self._policy, self._observe, self._send, self._instruction = policy, observe, send, instruction
        self._rate, self._max_age = RATE_HZ.check(rate_hz), MAX_AGE_MS.check(max_age_ms) / 1e3
        self._options: dict[str, Any] = {
            "budget": budget,
            "method": method,
            "steps": steps,
            "deadline_ms": deadline_ms,
            "min_steps": min_steps,
            "order": order,
        }
        self._hold, self._horizon = hold, HORIZON.check(execution_horizon)
        self._join, self._limits, self._on_fault, self._on_chunk = join, limits, on_fault, on_chunk
        self._clock = clock or _SystemClock()
        self._ended = threading.Event()
        self._planner: threading.Thread | None = None

    def stop(self) -> None:
        """End `run` at the next tick; any thread may call this, also `send` and `on_chunk`."""
        self._ended.set()

    def run(self, seconds: float = math.inf) -> LoopReport:
        """Send actions for `seconds` from the first one on, or until `stop` or a fault; returns the report.

        `on_fault` is called at once. Then `run` waits for the chunk that is being computed, ten seconds at most.

        Raises nothing of `observe`, the policy, `hold` and `send`: their errors are `LoopReport.fault`. Raises
        `UsageError` if what hung in the last run still does.
        """
        if self._planner is not None and self._planner.is_alive():
            raise UsageError("the camera or the policy of the last run still hangs. Make a new loop when it returns.")
        self._ended.clear()
        self._report, self._plan = LoopReport(self._rate, self._join), ActionPlan(self._join)
        self._fault: LoopFault | None = None
        self._start = math.nan
        self._arrived = threading.Event()
        self._last: _Planned | None = None
        self._too_slow = ""
        began = self._clock.now()
        with _punctual(self._report), self._computing():
            self._send_actions(began, seconds)
            if self._fault is not None:
                self._report.fault = self._fault
                self._on_fault(self._fault)
        return self._report

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute chunks in the block. At its end, also by Ctrl-C, wait: no process may end while an engine runs."""
        self._planner = planner = threading.Thread(target=self._compute_chunks, name="sinkprune chunks", daemon=True)
        planner.start()
        try:
            yield
        finally:
            self._ended.set()
            until = self._clock.now() + _HANGS_S
            while planner.is_alive() and self._clock.now() < until:
                self._clock.wait(self._clock.now() + _POLL_S)

    def _send_actions(self, began: float, seconds: float) -> None:
        report, clock = self._report, self._clock
        while not self._arrived.is_set() and not self._ended.is_set():
            clock.wait(clock.now() + min(_POLL_S, 1 / self._rate))
            if clock.now() - began > max(self._max_age, _FIRST_CHUNK_S):
                self._fail("stale frame", f"no chunk arrived in {clock.now() - began:.1f} s.", 0)
        tick, holding = 0, False
        while not self._ended.is_set() and tick < seconds * self._rate:
            due = self._start + tick / self._rate
            clock.wait(due)
            now = clock.now()
            if missed := math.floor((now - due) * self._rate):
                # An action of the past would be sent for the present.
                report.missed_ticks, tick = report.missed_ticks + missed, tick + missed
                continue
            if self._ended.is_set():
                break
            planned = self._plan.take(tick)
            action = planned or self._held(tick)
            if action is None or not self._sent(action, tick, now, now - due):
                break
            report.late_chunks += planned is None and not holding
            report.held_ticks += planned is None
            holding, tick = planned is None, tick + 1

    def _held(self, tick: int) -> _Planned | None:
        """Return the action of a tick without a new one; None after a fault."""
        if self._last is None:
            self._fail("stale frame", "the first chunk was past before the first tick was sent.", tick)
            return None
        try:
            return _Planned(self._hold(self._last.action), self._last.taken)
        except Exception as error:
            self._fail("hold", f"{type(error).__name__}: {error}", tick, error)
            return None

    def _sent(self, planned: _Planned, tick: int, now: float, late: float) -> bool:
        """Send an action, and return whether that was right; else there is a fault."""
        age = now - planned.taken
        if age > self._max_age:
            return self._fail(
                "stale frame",
                f"the frame behind the action is {1e3 * age:.0f} ms old, the limit is {1e3 * self._max_age:.0f} ms."
                f"{self._too_slow}",
                tick,
            )
        if not np.isfinite(planned.action).all():
            return self._fail("not finite", f"the action is {planned.action.tolist()}.", tick)
        action = planned.action
        if self._limits is not None:
            action = self._limits.applied(action, None if self._last is None else self._last.action)
            self._report.limited_actions += not np.array_equal(action, planned.action)
        try:
            self._send(action)
        except Exception as error:
            return self._fail("send", f"{type(error).__name__}: {error}", tick, error)
        self._last = _Planned(action, planned.taken)
        self._report.ticks += 1
        self._report.lateness_ms.add(1e3 * late)
        self._report.frame_age_ms.add(1e3 * age)
        return True

    def _fail(self, kind: FaultKind, message: str, tick: int, error: BaseException | None = None) -> bool:
        """Note the first fault, and end the loop; returns False."""
        self._fault = self._fault or LoopFault(kind, message, tick, error)
        self._ended.set()
        return False

    def _tick(self) -> int:
        """Return the first tick that is not past."""
        if math.isnan(self._start):
            return 0
        return max(0, math.ceil((self._clock.now() - self._start) * self._rate))

    def _compute_chunks(self) -> None:
        delays = deque[float](maxlen=_DELAYS)
        step: FaultKind = "observe"
        try:
            while not self._ended.is_set():
                step, asked = "observe", self._clock.now()
                observed = self._observe()
                if observed is None:
                    raise UsageError("the robot gave no observation: its cameras ended.")
                began, first = self._clock.now(), self._tick()
                taken = asked if observed.taken is None else observed.taken
                held = None
                if delays and self._join in ("inpaint", "trained"):
                    late = math.ceil(max(delays) * self._rate)
                    held = self._plan.coming(first, min(late, self._policy.facts.most_held or late))
                step = "act"
                report = self._policy.act(
                    observed.cameras, self._instruction, observed.state, **self._options, held=held
                )
                if self._arrived.is_set():
                    # A process's first chunk is slower than later ones.
                    delays.append(self._clock.now() - began)
                    self._report.chunk_ms.add(1e3 * delays[-1])
                self._arrive(report, first, taken)
                self._on_chunk(report)
                if self._arrived.is_set():
                    self._clock.wait(self._start + (first + self._horizon) / self._rate)
        except NumericsError as error:
            self._fail("not finite", str(error), self._tick(), error)
        except BaseException as error:
            self._fail(step, f"{type(error).__name__}: {error}", self._tick(), error)

    def _arrive(self, report: ActionReport, first: int, taken: float) -> None:
        self._report.chunks += 1
        if math.isnan(self._start):
            if self._report.chunks == 1 and self._clock.now() - taken > self._max_age:
                # A process's first chunk is slower than later ones. The arm stands still meanwhile.
                return
            self._plan.add(report.actions, 0, taken, 0)
            self._start = self._clock.now()
            self._arrived.set()
            return
        past, count = self._plan.add(report.actions, first, taken, self._tick()), len(report.actions)
        self._report.dropped_actions += past
        if past == count:
            self._too_slow = (
                f" The last chunk took longer than its {count} actions at {self._rate:g} Hz, so all were past. Take "
                "a smaller budget, fewer steps or a lower rate."
            )


@contextmanager
def _punctual(report: LoopReport) -> Iterator[None]:
    """Run the caller's thread when its tick is due, before others, as far as the system permits it."""
    switching, scheduler, priority = sys.getswitchinterval(), os.sched_getscheduler(0), os.sched_getparam(0)
    own = scheduler & ~os.SCHED_RESET_ON_FORK
    wanted, at = (os.SCHED_FIFO, os.sched_param(_PRIORITY)) if own == os.SCHED_OTHER else (own, priority)
    with suppress(PermissionError):
        # The threads that this one starts, of the policy too, must not get its priority.
        os.sched_setscheduler(0, wanted | os.SCHED_RESET_ON_FORK, at)
    report.real_time = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK in (os.SCHED_FIFO, os.SCHED_RR)
    sys.setswitchinterval(min(switching, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(switching)
        try:
            os.sched_setscheduler(0, scheduler, priority)
        except PermissionError:
            # Without the privilege, a thread gives its priority back, and never the flag.
            os.sched_setscheduler(0, scheduler | os.SCHED_RESET_ON_FORK, priority)
