"""The measurements as a table, as JSON and as a picture."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.table import Table

from peer_engines.rounds import Measured, Plan, Row
from sinkprune.contract.command_line.table_console import make_table, median_text, spread_text
from sinkprune.runtime.processor import processor_name
from sinkprune.runtime.profiling.plot import figure_bytes, import_matplotlib

# Okabe-Ito, which colour-blind readers can distinguish.
_COLOURS = {"vision": "#56B4E9", "prefill": "#009E73", "select": "#E69F00", "rest": "#999999"}
_DECODE = "#F0E442"


class Words(NamedTuple):
    """What a table calls the times of a model."""

    first: str
    """The time from the picture to the first result."""
    prefill: str
    step: str
    """What repeats after the prefill."""
    steps: str


ANSWERS = Words("TTFT", "prefill", "token", "new tokens")
ACTIONS = Words("TTFA", "prefix", "step", "denoising steps")
"""A robot policy: the time to its actions, with all denoising steps."""
HEAD = Words("TTFA", "prefix", "head", "pass of the action head")
"""A policy whose head reads all actions at once."""


def as_json(measured: Measured, model: str, plan: Plan, reference: str) -> dict[str, Any]:
    """Return all measurements, with every single answer."""
    return {
        "model": model,
        "machine": processor_name(),
        "python": platform.python_version(),
        "read_gb_per_s": measured.read_gb_per_s,
        "plan": asdict(plan),
        "reference": reference,
        "rows": [_row(measured, row, reference) for row in measured.rows],
        "not_run": measured.not_run,
    }


def _row(measured: Measured, row: Row, reference: str) -> dict[str, Any]:
    parts = ("ttft", "per_token", *sorted({part for answer in row.answers for part in answer["parts"]}))
    return {
        "engine": row.form.engine,
        "form": row.form.name,
        "way": row.way,
        "bits": row.form.bits,
        "sitting": row.sitting,
        "input_tokens": row.answers[0]["input_tokens"],
        "ms": {part: asdict(spread) if (spread := row.spread(part)) else None for part in parts},
        "ttft_over_reference": _ratio(measured, row, reference, "ttft"),
        "per_token_over_reference": _ratio(measured, row, reference, "per_token"),
        "first_token_as_most": measured.agreeing(row),
        "decode_gb_per_s": row.decode_gb_per_s,
        "peak_rss_bytes": row.peak_bytes,
        "load_peak_rss_bytes": row.facts["load_peak_bytes"],
        "load_seconds": row.facts["load_seconds"],
        "versions": row.facts["versions"],
        "answers": row.answers,
    }


def _ratio(measured: Measured, row: Row, reference: str, part: str) -> float | None:
    """Return the ratio to the reference of the same sitting; None without one, or without times."""
    other = measured.reference(row, reference)
    own, its = row.spread(part), other.spread(part) if other else None
    return own.median / its.median if own and its and its.median else None


def read_line(measured: Measured) -> str:
    """Return the speed of plain reads of memory, which bounds the GB/s of all engines."""
    reads = sorted(measured.read_gb_per_s)
    return f"a plain read of memory: {statistics.median(reads):.1f} GB/s ({reads[0]:.1f} to {reads[-1]:.1f})"


def table(measured: Measured, reference: str, words: Words) -> Table:
    """Return a row for each form and way, fastest first; medians in milliseconds, 95th percentiles in brackets."""
    first, prefill, step, _ = words
    headings = ["input", first, "vision", prefill, "select", f"a {step}", "GB/s", "peak GB", "load s"]
    made = make_table(["engine"], [*headings, f"{first} x", f"{step} x", "agrees"])
    for row in _fastest_first(measured):
        made.add_row(
            row.label,
            str(row.answers[0]["input_tokens"]),
            spread_text(row.spread("ttft")),
            *(median_text(row.spread(part)) for part in ("vision", "prefill", "select")),
            spread_text(row.spread("per_token")),
            _number(row.decode_gb_per_s, 1),
            _number(row.peak_bytes, 1, 1e9),
            _number(row.facts["load_seconds"], 1),
            _number(_ratio(measured, row, reference, "ttft"), 2),
            _number(_ratio(measured, row, reference, "per_token"), 2),
            f"{100 * measured.agreeing(row):.0f} %",
        )
    return made


def _fastest_first(measured: Measured) -> list[Row]:
    medians = {id(row): spread.median for row in measured.rows if (spread := row.spread("ttft"))}
    return sorted(measured.rows, key=lambda row: medians[id(row)])


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def plot(measured: Measured, heading: str, suffix: str, words: Words) -> bytes:
    """Draw the parts of TTFT and the time of a token for each row, and return the bytes of a picture file."""
    rows = _fastest_first(measured)
    figure = import_matplotlib()(figsize=(12, 1.8 + 0.32 * len(rows)), layout="constrained")
    first, second = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    # By place and not by name, because the reference has a row for each sitting.
    places, left = range(len(rows)), [0.0] * len(rows)
    for part, colour in _COLOURS.items():
        widths = [_parts(row)[part] for row in rows]
        first.barh(places, widths, left=left, color=colour, label=words.prefill if part == "prefill" else part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    tokens = [spread.median if (spread := row.spread("per_token")) else 0.0 for row in rows]
    second.barh(places, tokens, color=_DECODE)
    for axes, ends in ((first, left), (second, tokens)):
        for place, end in enumerate(ends):
            axes.text(end, place, f" {end:.0f}", va="center", fontsize=8)
        axes.set_xlim(0, max(ends, default=1.0) * 1.15)
        axes.spines[["top", "right"]].set_visible(False)
    first.set_yticks(places, [row.label for row in rows])
    first.invert_yaxis()
    first.set_xlabel(f"{words.first}, ms (medians)")
    second.set_xlabel(f"ms a {words.step}")
    figure.suptitle(heading, fontsize=10)
    first.legend(fontsize=8, frameon=False, loc="center right")
    return figure_bytes(figure, suffix)


def _parts(row: Row) -> Mapping[str, float]:
    """Return the medians of the parts, and the rest of TTFT."""
    known = {part: spread.median if (spread := row.spread(part)) else 0.0 for part in ("vision", "prefill", "select")}
    # The prefill includes selection.
    known["prefill"] -= known["select"]
    ttft = row.spread("ttft")
    return {**known, "rest": max(0.0, (ttft.median if ttft else 0.0) - sum(known.values()))}
