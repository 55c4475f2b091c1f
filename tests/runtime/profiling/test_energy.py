"""Joules of requests and their parts, compared with sums over small steps of time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkprune.contract.reports.energy import IdlePower
from sinkprune.contract.reports.report import OF_TTFT, PARTS
from sinkprune.runtime.power.curve import EnergyCurve
from sinkprune.runtime.power.sensor import Reading
from sinkprune.runtime.profiling.energy import budget_energy
from sinkprune.runtime.profiling.stage_spans import Span, StageSpans

IDLE = IdlePower(watts=3.0, p5=2.9, p95=3.1, seconds=5, readings=50)
STEP = 1e-4


class HostClock:
    """A backend that does all work at once."""

    def mark(self) -> Any:
        return None

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return 0.0


def request(start: float, tokens: int = 5, scale: float = 1.0) -> StageSpans:
    """Return parts of known lengths, one after the other with pauses between them."""
    found = StageSpans(HostClock())
    at = start
    for part, seconds in (("preprocess", 0.05), ("vision", 0.4), ("sanitizer", 0.01), ("projector", 0.02)):
        found.parts[part].append(Span(at, at + scale * seconds))
        at += scale * (seconds + 0.01)
    found.parts["prefill"].append(Span(at, at + scale * 0.3))
    found.parts["select"] += [Span(at + scale * place, at + scale * (place + 0.02)) for place in (0.1, 0.2)]
    at += scale * 0.35
    found.parts["ttft"].append(Span(start, at))
    found.end, found.tokens = at + scale * 0.5, tokens
    return found


def readings(period: float, seconds: float, watts: Callable[[float], float]) -> list[Reading]:
    """Return the readings of a counter every `period` seconds, for a power that changes with time."""
    moments = np.arange(0, seconds, STEP)
    joules = np.concatenate([[0.0], np.cumsum([watts(at) * STEP for at in moments])[:-1]])
    return [Reading(float(moments[at]), float(joules[at])) for at in range(0, len(moments), round(period / STEP))]


def curve(found: list[Reading]) -> EnergyCurve:
    return EnergyCurve([one.seconds for one in found], [one.joules for one in found])


def plain_joules(found: list[Reading], span: Span) -> float:
    """Return the joules of a span: of each stretch between two readings, the share that lies inside."""
    used = 0.0
    for before, after in itertools.pairwise(found):
        inside = min(span.end, after.seconds) - max(span.start, before.seconds)
        used += (after.joules - before.joules) * max(0.0, inside) / (after.seconds - before.seconds)
    return used


def test_joules_of_every_part_are_those_of_the_readings() -> None:
    found = readings(0.02, 8, lambda at: 5 + 4 * np.sin(3 * at))
    requests = [request(1.0), request(4.005)]
    energy = budget_energy(requests, curve(found), IDLE)
    assert energy is not None and (energy.runs, energy.left_out) == (2, 0)
    spans = [{**one.parts, "latency": [Span(one.parts["ttft"][0].start, one.end or 0)]} for one in requests]
    for part in ("preprocess", "vision", "sanitizer", "projector", "prefill", "select", "ttft", "latency"):
        gross = [sum(plain_joules(found, span) for span in one[part]) for one in spans]
        net = [
            joules - 3.0 * sum(span.end - span.start for span in one[part])
            for joules, one in zip(gross, spans, strict=True)
        ]
        use = energy.joules[part]
        assert use is not None
        assert use.joules_with_idle == pytest.approx(statistics.fmean(gross))
        assert use.joules == pytest.approx(statistics.fmean(net))
        assert use.deviation == pytest.approx(statistics.stdev(net))
    later = [plain_joules(found, Span(one.parts["ttft"][0].end, one.end or 0)) / 4 for one in requests]
    token = energy.joules["per_token"]
    assert token is not None and token.joules_with_idle == pytest.approx(statistics.fmean(later))
    whole = sum(plain_joules(found, one["latency"][0]) for one in spans)
    assert energy.watts == pytest.approx(
        whole / sum(one["latency"][0].end - one["latency"][0].start for one in spans)
    )


@settings(max_examples=25, deadline=None)
@given(period=st.floats(0.01, 0.2), start=st.floats(0.5, 1.5), scale=st.floats(0.2, 2.0), power=st.floats(1.0, 60.0))
def test_parts_add_up_whatever_the_period(period: float, start: float, scale: float, power: float) -> None:
    found = readings(max(STEP, round(period, 3)), 6, lambda at: power * (1 + (int(at * 10) % 3)))
    energy = budget_energy([request(start, scale=scale)], curve(found), IDLE)
    assert energy is not None and set(energy.joules) == set(PARTS)
    joules = {part: use.joules for part, use in energy.joules.items() if use is not None}
    assert sum(joules[part] for part in OF_TTFT) == pytest.approx(joules["ttft"], abs=1e-9)
    assert joules["ttft"] + 4 * joules["per_token"] == pytest.approx(joules["latency"], abs=1e-9)
    assert all(use.deviation is None and 0 <= use.sampled <= 1 for use in energy.joules.values() if use)


def test_parts_shorter_than_the_period_are_estimated() -> None:
    energy = budget_energy([request(1.0)], curve(readings(0.1, 5, lambda at: 9.0)), IDLE)
    assert energy is not None
    estimated = {part: use.estimated for part, use in energy.joules.items() if use}
    assert not any(estimated[part] for part in ("vision", "prefill", "ttft", "latency", "per_token"))
    assert all(estimated[part] for part in ("preprocess", "sanitizer", "projector", "select", "rest"))
    vision = energy.joules["vision"]
    assert vision is not None and vision.sampled == pytest.approx(0.3 / 0.4, abs=0.01)
    # Four times as fast, only the whole is measured.
    fast = budget_energy([request(1.0, scale=0.25)], curve(readings(0.1, 5, lambda at: 9.0)), IDLE)
    assert fast is not None
    assert {part for part, use in fast.joules.items() if use and not use.estimated} == {"latency", "ttft"}


def test_requests_without_readings_are_left_out() -> None:
    alive = curve(readings(0.05, 4, lambda at: 9.0))
    energy = budget_energy([request(1.0), request(3.5), request(20.0)], alive, IDLE)
    assert energy is not None and (energy.runs, energy.left_out) == (1, 2)
    assert budget_energy([request(3.5)], alive, IDLE) is None
    gap = [one for one in readings(0.05, 8, lambda at: 9.0) if not 1.2 < one.seconds < 2.4]
    energy = budget_energy([request(1.0), request(4.0)], curve(gap), IDLE)
    assert energy is not None and (energy.runs, energy.left_out) == (1, 1)


def test_one_token_has_no_joules_of_later_ones_and_parts_that_did_not_run_have_none() -> None:
    one = request(1.0, tokens=1)
    del one.parts["select"], one.parts["sanitizer"]
    energy = budget_energy([one], curve(readings(0.02, 5, lambda at: 9.0)), IDLE)
    assert energy is not None
    assert {part for part, use in energy.joules.items() if use is None} == {"per_token", "select", "sanitizer"}


def test_spans_wait_for_the_device_and_pass_parts_on() -> None:
    waited, parts = [], []

    class Device(HostClock):
        def elapsed_ms(self, start: Any, end: Any) -> float:
            waited.append(start)
            return 0.0

    class Also(StageSpans):
        def during(self, part: str) -> Any:
            parts.append(part)
            return super().during(part)

    spans = StageSpans(Device(), also=Also(HostClock()))
    with spans.during("prefill"), spans.during("select"):
        pass
    assert len(waited) == 4 and parts == ["prefill", "select"]
    (outer,), (inner,) = spans.parts["prefill"], spans.parts["select"]
    assert outer.start <= inner.start <= inner.end <= outer.end
