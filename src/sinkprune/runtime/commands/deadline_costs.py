"""The costs of requests with a deadline, as commands find them, and what they print about deadlines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.costs.file import cache_file, cached_costs, missing_costs, read_costs
from sinkprune.contract.costs.model import Costs
from sinkprune.contract.files.trust import Trust
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.compatibility import open_engines, own_engines, usual_backend
from sinkprune.runtime.commands import BundleOptions
from sinkprune.runtime.deadline.cost_measuring import place_of
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer, DeadlineReport
from sinkprune.runtime.steps.request import Request

_DAY_S = 86_400.0
_OLD_S = 30 * _DAY_S


def known_costs(options: BundleOptions, file: Path | None, bundle: Bundle) -> Costs:
    """Return the costs in `file`, or else those that `--warm-up` kept, before anything is loaded.

    Raises `DeadlineError`, `UsageError` for other files, and what `Pipeline.load` raises for engines and backends.
    """
    trust = Trust(options.engines_sha256, options.signed_by)
    built = open_engines(options.engines, bundle, trust) if options.engines else own_engines(bundle)
    name = options.backend or usual_backend(bundle, built)
    place = place_of(bundle.manifest, load_backend(name, options.threads, built, options.compute))
    costs = read_costs(file, place) if file else cached_costs(place)
    if costs is None:
        raise missing_costs(place)
    return costs


def run_once(pipeline: Pipeline, request: Request) -> None:
    """Answer one token at the method's last budget: the first request of a process is slower than its costs say."""
    budget = [*pipeline.bundle.manifest.plans[request.method]][-1]
    plain = replace(request, budget=budget, deadline_ms=None, max_new_tokens=1, min_new_tokens=0)
    # The form of an answer may be too long for one token.
    pipeline.answer(replace(plain, schema=None, regex=None, choice=())).rest()


def in_time(answer: Answer) -> str:
    deadline = answer.deadline
    if deadline is None:
        return ""
    tokens = f"{deadline.expected_tokens} tokens" if deadline.expected_tokens > 1 else "the first token"
    return (
        f"\ndeadline {deadline.deadline_ms:g} ms: answered in {deadline.measured_ms:.0f} ms, with reading the "
        f"picture, expected {tokens} in {deadline.predicted_ms:.0f} ms; {deadline.reason}"
    )


def late_line(deadline: DeadlineReport) -> str:
    """Return a warning for a late answer, and nothing for one in time."""
    if deadline.met:
        return ""
    late = (
        f"late: {deadline.measured_ms:.0f} ms where {deadline.deadline_ms:g} were given, at budget {deadline.budget}"
    )
    if deadline.can_meet:
        return f"{late}.\n"
    return f"{late}. No budget was expected to bring a token sooner than in {deadline.predicted_first_ms:.0f} ms.\n"


def not_kept(pipeline: Pipeline) -> str:
    """Return a warning about costs that later runs will not find."""
    file = cache_file(pipeline.place)
    where = f"written to '{escaped(str(file))}'" if file else "kept, because this user has no home folder"
    return (
        f"warning: the costs could not be {where}: the next run needs --warm-up again. Make that folder writable, "
        "or set XDG_CACHE_HOME to one that is.\n"
    )


def doubtful_costs(deadline: DeadlineReport, costs: Costs, earlier: Costs | None) -> str:
    """Return a line about `costs` that are old or were measured under load, and nothing about others.

    `earlier` are the kept costs that these replaced, if any.
    """
    age, load_doubt = deadline.costs_age_s or 0.0, costs.load_doubt(earlier)
    old = f"are {age / _DAY_S:.0f} days old" if age > _OLD_S else ""
    doubts = [doubt for doubt in (old, load_doubt) if doubt]
    if not doubts:
        return ""
    hint = costs.place.thread_hint if load_doubt else ""
    return (
        f"note: the costs {' and '.join(doubts)}. Measure them again with --warm-up when the machine is idle.{hint}\n"
    )
