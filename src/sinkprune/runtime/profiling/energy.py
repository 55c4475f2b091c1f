"""Joules of a budget's requests and of their parts, from their times and a sensor's readings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sinkprune.contract.reports.energy import SAMPLED_ENOUGH, BudgetEnergy, IdlePower, PartEnergy
from sinkprune.contract.reports.report import OF_TTFT, PARTS
from sinkprune.runtime.power.curve import EnergyCurve
from sinkprune.runtime.profiling.stage_spans import Span, StageSpans


class _Use(NamedTuple):
    """The energy of one part of a request."""

    seconds: float
    joules: float
    sampled_seconds: float


def budget_energy(requests: Sequence[StageSpans], curve: EnergyCurve, idle: IdlePower) -> BudgetEnergy | None:
    """Return the means of `requests`, without those that lack readings; None if all of them do."""
    uses = [found for request in requests if (found := _uses(request, curve)) is not None]
    if not uses:
        return None
    seconds, joules = (sum(use["latency"][place] for use in uses) for place in (0, 1))
    return BudgetEnergy(
        runs=len(uses),
        left_out=len(requests) - len(uses),
        watts=joules / seconds,
        joules={part: _part([use.get(part) for use in uses], idle) for part in PARTS},
    )


def _uses(request: StageSpans, curve: EnergyCurve) -> Mapping[str, _Use] | None:
    """Return the energy of each part of a request; None without readings."""
    # From the first picture to the first token.
    first = Span(request.parts["ttft"][0].start, request.parts["ttft"][-1].end)
    assert request.end is not None
    spans = {part: own for part, own in request.parts.items() if part in PARTS}
    spans |= {
        "latency": [Span(first.start, request.end)],
        "per_token": [Span(first.end, request.end)],
        "ttft": [first],
    }
    uses = {part: use for part, own in spans.items() if (use := _use(own, curve)) is not None}
    if len(uses) < len(spans):
        return None
    known, ttft, later = [uses[part] for part in OF_TTFT if part in uses], uses["ttft"], uses.pop("per_token")
    rest = ttft.seconds - sum(use.seconds for use in known), ttft.joules - sum(use.joules for use in known)
    # The rest is many short stretches, without two readings in one of them.
    uses["rest"] = _Use(*rest, sampled_seconds=0.0)
    if request.tokens > 1:
        uses["per_token"] = _Use(*(value / (request.tokens - 1) for value in later))
    return uses


def _use(spans: Sequence[Span], curve: EnergyCurve) -> _Use | None:
    joules = [curve.joules(*span) for span in spans]
    known = [value for value in joules if value is not None]
    if len(known) < len(spans):
        return None
    seconds = sum(span.end - span.start for span in spans)
    return _Use(seconds, sum(known), sum(curve.sampled_seconds(*span) for span in spans))


def _part(uses: Sequence[_Use | None], idle: IdlePower) -> PartEnergy | None:
    """Return the means of one part; None if it took no time in some run."""
    known = [use for use in uses if use is not None and use.seconds > 0]
    if len(known) < len(uses):
        return None
    net = [use.joules - idle.watts * use.seconds for use in known]
    sampled = sum(use.sampled_seconds for use in known) / sum(use.seconds for use in known)
    return PartEnergy(
        joules=statistics.fmean(net),
        joules_with_idle=statistics.fmean(use.joules for use in known),
        deviation=statistics.stdev(net) if len(net) > 1 else None,
        sampled=sampled,
        estimated=sampled < SAMPLED_ENOUGH,
    )
