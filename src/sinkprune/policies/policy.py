"""A robot policy, loaded: frames, instruction and state in, a chunk of actions out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sinkprune.contract.budgets import UNPRUNED, Plan
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import check_plan_names, check_type, checks_options, checks_options_and, shows_fields
from sinkprune.contract.policy_facts import PolicyFacts
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress, reporting, unreported
from sinkprune.deadlines.costs import ActionCosts
from sinkprune.deadlines.measuring import (
    MEASURING_COSTS,
    SECONDS,
    SECONDS_RANGE,
    KeepsCosts,
    shown_progress,
    warn_of_load,
)
from sinkprune.deadlines.policy import schedules_up_to
from sinkprune.policies.chunk import Choose, StepTimes, check_chunk, layouts_of, run_chunk
from sinkprune.policies.deadline import MEASURED_STEPS, ChunkDeadline, check_costs, least_steps, measure_costs
from sinkprune.policies.observation import Cameras, Observation, observed
from sinkprune.policies.report import ActionReport
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.backends.compatibility import BuiltEngines
from sinkprune.runtime.hooks import NOBODY, Observer
from sinkprune.runtime.loading import LOAD_OPTIONS, LoadOptions, StaysInProcess, check_kind, load_model
from sinkprune.runtime.steps.chain import Wrap
from sinkprune.runtime.steps.request import DEADLINE_MS

_OF_ACT = ("budget", "method", "steps", "seed", "noise", "deadline_ms", "min_steps", "order")


class Policy(StaysInProcess, KeepsCosts[ActionCosts]):
    """A loaded robot policy. Every budget and the unpruned baseline run on the same engines.

    Any number of threads may share a policy; they take turns on backends that run one call at once.
    """

    @checks_options
    def __init__(
        self,
        bundle: Bundle,
        backend: Backend,
        built: BuiltEngines | None = None,
        wrap: Wrap | None = None,
        progress: OnProgress = unreported,
    ) -> None:
        """Load the bundle's graphs on `backend`, or the engines `built` from them; `wrap` may replace each engine."""
        check_kind(bundle, acts=True)
        super().__init__(bundle, backend, ActionCosts)
        self.load_ms: float | None = None
        """Milliseconds that `Policy.load` took, with the check of sums; None without `Policy.load`."""
        self._model = load_model(bundle, backend, built, wrap, None, progress)
        self._times = StepTimes(self._model.chain, self.facts)

    @classmethod
    @checks_options_and(dict.fromkeys(_OF_ACT, "Policy.act"))
    @shows_fields(LoadOptions)
    def load(cls, bundle: str | os.PathLike[str] | Bundle, **options: Any) -> Policy:
        """Load a policy's bundle or folder of engines; `options` are those of `Pipeline.load`, without `fit`.

        Raises `BundleError`, `EnginesError`, `BackendError` and `UsageError` (also for a bundle that is no policy;
        `OptionError` for an unknown argument), and `TypeError` for an argument of a wrong type.
        """
        began, loading = time.perf_counter(), LoadOptions(**options)
        opened = loading.open(bundle, acts=True)
        with loading.during("loading the engines") as progress:
            policy = cls(*opened, loading.wrap, reporting(progress))
        policy.load_ms = (time.perf_counter() - began) * 1e3
        return policy

    @property
    def facts(self) -> PolicyFacts:
        """The policy's facts: sizes of chunk, state and actions, and its statistics."""
        return self.bundle.manifest.acting

    @checks_options_and(dict.fromkeys(LOAD_OPTIONS, "Policy.load"))
    def act(
        self,
        cameras: Cameras,
        instruction: str,
        state: Sequence[float] | Array = (),
        *,
        budget: str = UNPRUNED,
        method: str = "sinkpruner",
        steps: int | None = None,
        seed: int | None = None,
        noise: Array | None = None,
        deadline_ms: float | None = None,
        min_steps: int | None = None,
        order: str = "rgb",
        held: Sequence[Sequence[float]] | Array | None = None,
        observer: Observer = NOBODY,
    ) -> ActionReport:
        """Return the next chunk of actions.

        `cameras` has the last frame of each camera: a Pillow image, a uint8 [height,width,3] array or a file, or None
        for a camera without a frame. A dict has frames by the names in `facts.cameras`, in any order; 'wrist' is
        short for 'observation.images.wrist'. A list has them in the order of the policy's training. `state` has the
        robot's numbers in its own units; none for a policy that reads no state. `budget` and `method` are the
        bundle's. `order` is that of the channels of arrays: "rgb", or OpenCV's "bgr".

        `steps` are denoising steps (default: the checkpoint's). `seed` draws the noise that the chunk begins with,
        and `noise` [chunk,action_dim] is that noise; without both it differs each time. `held` [n,width] are the
        first actions of the chunk, in the robot's units: those that run before this chunk can arrive. Denoising
        continues them (real-time chunking, arXiv 2506.07339, without its gradient). A policy without an action expert
        denoises nothing, and takes none of them but `seed`, which changes nothing.

        With `deadline_ms`, milliseconds from this call on, `budget` is the largest that may be chosen and `steps` the
        most. The largest budget runs whose chunk is expected in time with `min_steps` or more (default: 5), with as
        many as fit. `warm_up` must have measured the costs, or an earlier process. A chunk is never cut short.

        Raises `ImageError`, `PromptError`, `BudgetError`, `UsageError` (`DeadlineError` for unknown costs),
        `PruningError` and `NumericsError`.
        """
        began, manifest = time.perf_counter(), self.bundle.manifest
        check_type("observer", observer, (Observer,), "an Observer")
        plan = self._plan(method, budget)
        observation = observed(
            manifest, cameras, instruction, state, order=order, steps=steps, seed=seed, noise=noise, held=held
        )
        least = least_steps(min_steps, observation.steps, deadline_ms)
        deadline_ms = None if deadline_ms is None else DEADLINE_MS.check(deadline_ms)
        if deadline_ms is None:
            self._model.chain.load_plan(plan)
            chosen = budget, observation.steps
            return self._run(observation, method, plan, lambda text: chosen, observer, timed=False)
        costs = self._known_costs(method)
        check_costs(costs, manifest, method, budget, len(observation.cameras))
        deadline = ChunkDeadline(
            costs,
            self._history_of(costs),
            began=began,
            deadline_ms=deadline_ms,
            budget=budget,
            most_steps=observation.steps,
            least_steps=least,
            frames=len(observation.cameras),
        )
        uses = self._model.chain.first_uses
        report = self._run(observation, method, plan, deadline.choose, observer)
        comparable = self._model.chain.first_uses == uses
        return replace(report, deadline=deadline.report(report.step_ms, comparable=comparable))

    @checks_options
    def warm_up(
        self,
        cameras: Cameras,
        instruction: str,
        state: Sequence[float] | Array = (),
        *,
        budget: str = UNPRUNED,
        method: str = "sinkpruner",
        order: str = "rgb",
        seconds: float = SECONDS,
        progress: bool | OnProgress = False,
    ) -> ActionCosts:
        """Measure what chunks cost on this machine at `budget` and all smaller ones, and load these budgets.

        Chunks with a deadline need these costs. Repeats measurements for `seconds`, from 0 to 86400, but every budget
        runs four times or more. Takes what `act` takes: frames, an instruction and a state like those of later
        chunks, and `progress` as `Pipeline.warm_up` does. Sets and returns `costs`, and writes them to the user's
        cache folder for later processes.

        Warns with `CostsWarning` if other programs kept the machine busy meanwhile, or if that folder cannot be
        written. Raises what `act` raises.
        """
        seconds, manifest = SECONDS_RANGE.check(seconds), self.bundle.manifest
        self._plan(method, budget)
        observation = observed(manifest, cameras, instruction, state, order=order)
        schedules = schedules_up_to(manifest, method, budget, layouts_of(self._model, observation))

        def act(name: str, steps: int) -> tuple[float, ActionReport]:
            seen = list[float]()

            def choose(text: int) -> tuple[str, int]:
                seen.append(time.perf_counter())
                return name, steps

            report = self._run(observation, method, None, choose, NOBODY)
            return seen[0], report

        budgets, frames = [planned.budget for planned in schedules], len(observation.cameras)
        steps = min(MEASURED_STEPS, self.facts.steps)
        with self.backend.turn:
            self._times.load(self.facts.steps)
        with shown_progress(MEASURING_COSTS, progress) as report:
            costs = self._keep_measured(
                lambda: measure_costs(act, method, budgets, frames, steps, self.place, seconds, report)
            )
        warn_of_load(costs)
        return costs

    @checks_options
    def check(
        self,
        cameras: Cameras,
        instruction: str,
        state: Sequence[float] | Array = (),
        *,
        budget: str = UNPRUNED,
        method: str = "sinkpruner",
    ) -> None:
        """Check that `act` takes these, without running the model; raises what `act` raises for them."""
        self._plan(method, budget)
        observation = observed(self.bundle.manifest, cameras, instruction, state)
        check_chunk(self._model, observation, method, budget)

    def load_plans(self, method: str, progress: OnProgress = unreported) -> None:
        """Load the graphs of all budgets of a method, and what steps share, so that no chunk waits for them.

        `progress` is called before and after each budget. Raises `BudgetError` for a method that the bundle does not
        have.
        """
        self._model.load_plans(method, progress)
        with self.backend.turn:
            self._times.load(self.facts.steps)

    def _plan(self, method: str, budget: str) -> Plan | None:
        check_plan_names(budget, method)
        return self.bundle.manifest.plan(method, budget)

    def _run(
        self,
        observation: Observation,
        method: str,
        plan: Plan | None,
        choose: Choose,
        observer: Observer,
        *,
        timed: bool = True,
    ) -> ActionReport:
        return run_chunk(self._model, self._times, observation, method, plan, choose, observer, timed=timed)
