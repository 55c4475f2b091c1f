"""A camera's steady rate as a picture: the latency of every frame, and the machine's conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.reports.rate_report import RateReport
from sinkprune.runtime.profiling.plot import figure_bytes, import_matplotlib

# Okabe-Ito colours, safe for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_WIDTH, _HEIGHT, _MORE_HEIGHT = 10, 3.6, 1.9
# Only the hottest places are drawn, to keep lines apart. The JSON has all.
_MOST_LINES = 6


def plot_rate(report: RateReport, suffix: str) -> bytes:
    """Return the bytes of a picture file: latencies over time, then temperatures and clocks if known."""
    conditions = report.conditions
    below = [
        (label, lines)
        for label, lines in (
            ("°C", _highest(conditions.temperatures_c)),
            ("MHz", conditions.clocks_mhz),
        )
        if any(value is not None for values in lines.values() for value in values)
    ]
    heights = [_HEIGHT, *(_MORE_HEIGHT for _ in below)]
    figure = import_matplotlib()(figsize=(_WIDTH, sum(heights) + 0.6), layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    _draw_latencies(rows[0], report)
    figure.legend(*rows[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", frameon=False)
    for axes, (label, lines) in zip(rows[1:], below, strict=True):
        for colour, (name, values) in zip(_COLOURS, lines.items(), strict=False):
            points = [(at, value) for at, value in zip(conditions.seconds, values, strict=True) if value is not None]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=name)
        axes.set_ylabel(label)
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in rows:
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("seconds")
    rows[0].set_title(
        f"{report.model}, {report.weights.beside(report.precision)}, {report.backend}, "
        f"{counted(report.threads, 'thread')}; {report.rate_hz:g} frames a second\n"
        f"{report.machine}; {report.prompt_tokens} text + {report.new_tokens} new tokens",
        fontsize=10,
    )
    return figure_bytes(figure, suffix)


def _draw_latencies(axes: Any, report: RateReport) -> None:
    """Draw a point for each answered frame at its arrival, and a tick at the bottom for each missed frame."""
    for number, (name, budget) in enumerate(report.rates.items()):
        colour, answered = _COLOURS[number % len(_COLOURS)], set(budget.answered_frames)
        came = [budget.start_s + frame / report.rate_hz for frame in budget.answered_frames]
        latency = budget.latency_ms
        shares = f"p50 {latency.p50:.0f}, p95 {latency.p95:.0f}, p99 {latency.p99:.0f}, max {latency.maximum:.0f} ms"
        label = f"{name}: {shares}; missed {budget.missed} of {budget.frames}"
        axes.plot(came, budget.answer_latency_ms, ".", markersize=4, color=colour, label=label)
        missed = [budget.start_s + frame / report.rate_hz for frame in range(budget.frames) if frame not in answered]
        axes.plot(missed, [0.0] * len(missed), "|", markersize=9, color=colour)
    axes.axhline(1e3 / report.rate_hz, color="#999999", linewidth=0.8, linestyle="--", label="the next frame arrives")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("latency, ms")


def _highest(lines: Mapping[str, Sequence[float | None]]) -> dict[str, Sequence[float | None]]:
    """Return the lines with the highest values, in their order."""
    highest = {
        name: max((value for value in values if value is not None), default=0.0) for name, values in lines.items()
    }
    chosen = sorted(highest, key=lambda name: -highest[name])[:_MOST_LINES]
    return {name: values for name, values in lines.items() if name in chosen}
