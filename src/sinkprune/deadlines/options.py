"""The costs of requests with a deadline, as commands find, keep and report them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import escaped
from sinkprune.contract.errors import PruningError, UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.schedule import VisualLayout
from sinkprune.deadlines.costs import ActionCosts, Costs, MeasuredCosts, Place, not_kept
from sinkprune.deadlines.measuring import KeepsCosts, place_of
from sinkprune.deadlines.pipeline import Pipeline
from sinkprune.deadlines.policy import schedules_up_to
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.known import usual_backend
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.loading import engines_of
from sinkprune.runtime.steps.answer import Answer, DeadlineOutcome, DeadlineReport
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import Request

_DAY_S = 86_400.0
_OLD_S = 30 * _DAY_S


def costs_before_loading(options: Options, file: Path | None, bundle: Bundle) -> Costs:
    """Return the costs in `file`, or else those that `--warm-up` kept, before anything is loaded.

    Raises `DeadlineError`, `UsageError` for other files, and what `Pipeline.load` raises for engines and backends.
    """
    place = place_here(options, bundle)
    costs = Costs.read(file, place) if file else Costs.cached(place)
    if costs is None:
        raise Costs.missing(place)
    return costs


def check_cost_options(warm_up: bool, costs: Path | None, deadline_ms: float | None) -> None:
    """Raise `UsageError` for `--warm-up` and `--costs` without a deadline, and for both."""
    if (costs or warm_up) and deadline_ms is None:
        given = "--costs" if costs else "--warm-up"
        raise UsageError(f"{given} is for a deadline, and there is none. Add --deadline-ms.")
    if costs and warm_up:
        raise UsageError("--warm-up measures costs, and --costs reads measured ones. Leave out one of the two.")


def place_here(options: Options, bundle: Bundle) -> Place:
    """Return the place of costs of `bundle`, with the engines and the backend of `options`, before they are loaded.

    Raises what `Pipeline.load` raises for engines and backends.
    """
    built = engines_of(bundle, options.engines, options.engines_trust)
    name = options.backend or usual_backend(built.engines if built else None)
    return place_of(bundle.manifest, load_backend(name, options.threads, built, options.compute))


def run_once(pipeline: Pipeline, request: Request) -> None:
    """Answer one token at each budget of `first_budgets`: such requests are slower than their costs say.

    The pictures of `request` are decoded. A picture of which a budget would drop nothing is answered unpruned. Raises
    what `request` itself raises.
    """
    layouts = [pipeline.family.layout(decoded(one, pipeline.family)) for one in request.pictures]
    # A method that takes no deadline is rejected for that, not for what its last budget lacks.
    pipeline.answer(request)
    plain = request.for_one_token()
    for budget in first_budgets(pipeline.bundle.manifest, pipeline.backend, request.method, request.budget, layouts):
        try:
            pipeline.answer(replace(plain, budget=budget)).rest()
        except PruningError:
            pipeline.answer(replace(plain, budget=UNPRUNED)).rest()


def first_budgets(
    manifest: Manifest, backend: Backend, method: str, budget: str, layouts: Sequence[VisualLayout]
) -> list[str]:
    """Return the budgets to run before a deadline counts: the smallest for pictures of these `layouts`.

    Where engines compile what they first meet, all up to `budget`.
    """
    budgets = [planned.budget for planned in schedules_up_to(manifest, method, budget, layouts)]
    return budgets if backend.compiles_lengths else budgets[-1:]


def saved_costs_lines(
    keeper: KeepsCosts[Costs] | KeepsCosts[ActionCosts], options: Options, *, measured: bool
) -> str:
    """Keep the costs of a pipeline or a policy for later runs, unless they are a file's; return lines about them.

    `measured` is whether this command measured them.
    """
    if (costs := keeper.costs) is None:
        return ""
    doubt = _doubtful_costs(costs)
    if options.costs:
        return doubt
    file = keeper.save_costs()
    if file and not measured:
        return doubt
    of = "" if options.budget == UNPRUNED else f" of '{options.budget}' and smaller budgets"
    return (
        doubt
        + escaped(f"note: the costs{of} are kept in '{file}'." if file else f"warning: {not_kept(costs)}")
        + "\n"
    )


def _doubtful_costs(costs: MeasuredCosts) -> str:
    """Return a line about `costs` that are old or were measured under load, and nothing about others."""
    age = costs.age_s or 0.0
    old = f"are {age / _DAY_S:.0f} days old" if age > _OLD_S else ""
    doubts = [doubt for doubt in (old, costs.load_doubt) if doubt]
    if not doubts:
        return ""
    hint = costs.place.thread_hint if costs.load_doubt else ""
    return (
        f"note: the costs {' and '.join(doubts)}. Measure them again with --warm-up when the machine is idle.{hint}\n"
    )


def measured_ms(deadline: DeadlineOutcome) -> str:
    """Return the measured milliseconds, whole ones unless a late answer would look in time."""
    measured = deadline.measured_ms
    rounded = (f"{measured:.{digits}f}" for digits in range(6))
    return next((text for text in rounded if deadline.met or float(text) > deadline.deadline_ms), str(measured))


def in_time_line(answer: Answer, deadline: DeadlineReport) -> str:
    """Return a line about an answer's deadline."""
    unit = "passes over the list" if answer.choices else "tokens"
    tokens = f"{deadline.expected_tokens} {unit}" if deadline.expected_tokens > 1 else "the first token"
    return (
        f"deadline {deadline.deadline_ms:g} ms: answered in {measured_ms(deadline)} ms, with reading the picture, "
        f"expected {tokens} in {deadline.predicted_ms:.0f} ms; {deadline.reason}\n"
    )


def late_line(deadline: DeadlineReport) -> str:
    """Return a warning for a late answer, and nothing for one in time."""
    if deadline.met:
        return ""
    soonest = "" if deadline.can_meet else f"a token sooner than in {deadline.predicted_first_ms:.0f} ms"
    return f"late: {how_late(deadline, soonest)}\n"


def how_late(deadline: DeadlineOutcome, soonest: str) -> str:
    """Return how late an answer or a chunk was, and what no budget was expected to bring, if anything."""
    late = f"{measured_ms(deadline)} ms where {deadline.deadline_ms:g} were given, at budget {deadline.budget}."
    return f"{late} No budget was expected to bring {soonest}." if soonest else late
