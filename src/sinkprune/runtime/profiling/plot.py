"""Plots of profiles."""

from __future__ import annotations

import atexit
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.contract.checks import counted, install_command, needs_package
from sinkprune.contract.report import BudgetReport, EngineHeader, ProfileReport, RateReport, Spread

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

# All colours are Okabe-Ito's, safe for colour-blind readers. In the order of the work.
_PARTS = {
    "preprocess": ("preprocessing", "#999999"),
    "vision": ("vision tower", "#56B4E9"),
    "sanitizer": ("sanitizer", "#D55E00"),
    "projector": ("projector", "#0072B2"),
    "prefill": ("prefill", "#009E73"),
    "select": ("selection", "#E69F00"),
    "rest": ("rest", "#000000"),
    "decode": ("further tokens", "#F0E442"),
    "expert": ("denoising", "#CC79A7"),
}
"""The names and colours of the parts of answers, and of a robot policy's chunks."""
PART_NAMES = {part: name for part, (name, _) in _PARTS.items()}
"""The names of parts in plots and tables."""


def import_matplotlib() -> Any:
    """Return matplotlib's Figure class, which draws without a screen. Raises `UsageError` if it is not installed.

    matplotlib would write its list of fonts to the home directory. Here it goes to a folder that this process removes
    at its end, unless MPLCONFIGDIR names another or matplotlib was imported before.
    """
    if "matplotlib" not in sys.modules and "MPLCONFIGDIR" not in os.environ:
        folder = os.environ["MPLCONFIGDIR"] = tempfile.mkdtemp(prefix="matplotlib-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # It warns if its list of fonts takes more than five seconds.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with needs_package("--plot", install_command("plot")):
        from matplotlib.figure import Figure
    return Figure


def plot_report(report: ProfileReport, suffix: str) -> bytes:
    """Return the bytes of a picture file with a stacked bar for each budget, from preprocessing to the last token."""
    rows = {name: _widths(budget, report.new_tokens) for name, budget in report.rows().items()}
    labels = []
    for name, budget in report.rows().items():
        ttft = budget.ms["ttft"]
        first = f"; first token {ttft.median:.0f} ms ({budget.speedup.ttft:.2f} x as fast)" if ttft else ""
        labels.append(f"{sum(rows[name].values()):.0f} ms{first}")
    spreads = [budget.ms["latency"] for budget in report.rows().values()]
    below = "milliseconds: median of the whole answer, divided as the medians of its parts; the line ends at p95"
    title = f"{report.prompt_tokens} text + {report.new_tokens} new tokens"
    return stacked_bars(report, rows, spreads, labels, title, below, suffix)


def stacked_bars(
    head: EngineHeader,
    rows: Mapping[str, Mapping[str, float]],
    spreads: Sequence[Spread | None],
    labels: Sequence[str],
    title: str,
    below: str,
    suffix: str,
) -> bytes:
    """Return the bytes of a picture file of type `suffix` with a stacked bar for each of `rows`.

    `rows` are milliseconds by part, by the names next to the bars, and `spreads` are those of their sums, whose p95
    ends a line. `labels` stand after the bars, `title` above them
    after the machine of `head`, and `below` under the axis.
    """
    figure = import_matplotlib()(figsize=(10, 1.6 + 0.55 * len(rows)), layout="constrained")
    axes, names = figure.add_subplot(), list(rows)
    parts = [part for part in _PARTS if any(part in row for row in rows.values())]
    left = [0.0] * len(names)
    for part in parts:
        row, (label, colour) = [rows[name][part] for name in names], _PARTS[part]
        axes.barh(names, row, left=left, color=colour, label=label, edgecolor="white", linewidth=0.4)
        left = [start + width for start, width in zip(left, row, strict=True)]
    ends = [max(end, spread.p95 if spread else 0) for end, spread in zip(left, spreads, strict=True)]
    beyond = [end - start for end, start in zip(ends, left, strict=True)]
    axes.errorbar(left, names, xerr=[[0.0] * len(ends), beyond], fmt="none", ecolor="black", elinewidth=1, capsize=4)
    for number, (end, label) in enumerate(zip(ends, labels, strict=True)):
        axes.text(end, number, f"  {label}", va="center", fontsize=10)
    axes.set_xlim(0, max(ends) * 1.6)
    axes.invert_yaxis()
    axes.set_xlabel(below)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{head.model}, {head.weights.beside(head.precision)}, {head.backend}, {counted(head.threads, 'thread')}\n"
        f"{head.machine}; {title}",
        fontsize=10,
    )
    figure.legend(
        ncols=len(parts), fontsize=10, handlelength=1.2, columnspacing=1.2, loc="outside lower center", frameon=False
    )
    return figure_bytes(figure, suffix)


def figure_bytes(figure: Any, suffix: str) -> bytes:
    """Return the bytes of a matplotlib figure as a picture file of type `suffix`, for example ".png"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix.lstrip("."), dpi=140)
    return buffer.getvalue()


def _widths(budget: BudgetReport, new_tokens: int) -> dict[str, float]:
    """Return the milliseconds of all parts, scaled to their median sum: medians of parts need not add up to it."""
    ms = {part: spread.median if spread else 0.0 for part, spread in budget.ms.items()}
    ms["decode"] = ms["per_token"] * (new_tokens - 1)
    ms["prefill"] -= ms["select"]
    widths = {part: ms[part] for part in _PARTS if part != "expert"}
    scale = ms["latency"] / sum(widths.values()) if ms["latency"] else 1.0
    return {part: scale * width for part, width in widths.items()}


_LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_WIDTH, _HEIGHT, _MORE_HEIGHT = 10, 3.6, 1.9
# Only the hottest places are drawn, to keep lines apart. The JSON has all.
_MOST_LINES = 6


def plot_rate(report: RateReport, suffix: str) -> bytes:
    """Return the bytes of a picture file: latencies over time, then temperatures and clocks if known."""
    conditions = report.conditions
    known = (("°C", _highest(conditions.temperatures_c)), ("MHz", conditions.clocks_mhz))
    below = [(label, lines) for label, lines in known if any(set(values) - {None} for values in lines.values())]
    heights = [_HEIGHT, *(_MORE_HEIGHT for _ in below)]
    figure = import_matplotlib()(figsize=(_WIDTH, sum(heights) + 0.6), layout="constrained")
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    _draw_latencies(rows[0], report)
    figure.legend(*rows[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", frameon=False)
    for axes, (label, lines) in zip(rows[1:], below, strict=True):
        for colour, (name, values) in zip(_LINE_COLOURS, lines.items(), strict=False):
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
    for number, (name, budget) in enumerate(report.rates.items()):
        colour, answered = _LINE_COLOURS[number % len(_LINE_COLOURS)], set(budget.answered_frames)
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
    highest = {name: max((value or 0.0 for value in values), default=0.0) for name, values in lines.items()}
    chosen = sorted(highest, key=lambda name: -highest[name])[:_MOST_LINES]
    return {name: values for name, values in lines.items() if name in chosen}
