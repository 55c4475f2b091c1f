"""The tables that `make figures` writes, and that the pages hold what was measured."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import figure_parts
import figure_rows
import figure_tables
import figures
from sinkprune.contract.errors import UsageError
from sinkprune.export.methods import METHODS as ALL_METHODS
from support.programs.repository import ROOT

WHERE = "2026-01-31, 2 threads of a shared Some Processor (AVX-512 with bf16), onnxruntime 1.31.0"


def test_accuracies_and_paired_differences_of_methods() -> None:
    def point(accuracy: float, versus: float | None = None) -> dict[str, Any]:
        difference = None if versus is None else {"mean": versus, "ci95": [versus - 0.01, versus + 0.01]}
        interval = [accuracy - 0.02, accuracy + 0.01]
        return {"accuracy": accuracy, "ci95": interval, "mean_visual_tokens": 35.2, "versus_first": difference}

    methods = {
        "sinkpruner": {"a": point(0.9), "b": point(0.8)},
        "dart": {"a": point(0.7, -0.2), "b": point(0.6, -0.2)},
    }
    measured = measured_rows(0.9, "2026-01-31", 50.0)
    measured["report"] |= {"backend": "ort-cpu", "methods": methods, "none": point(0.99)}
    table = figure_tables.paired(measured)
    assert f"Measured on {WHERE}. Unpruned: 99.0 (97.0 to 100.0)\n" in table
    assert (
        "| mean visual tokens a layer, of 35 | 35 |  | 35 |  |\n| `sinkpruner` | 90.0 (88.0 to 91.0) |  | " in table
    )
    dart = "| `dart` | 70.0 (68.0 to 71.0) | -20.0 (-21.0 to -19.0) | 60.0 (58.0 to 61.0) | -20.0 (-21.0 to -19.0) |"
    assert table.splitlines()[-1] == dart
    del methods["dart"]["b"]
    assert figure_tables.versus_full(measured).splitlines()[-1] == "| `dart` | -20.0 (-21.0 to -19.0) | - |"


def measured_rows(accuracy: float, date: str, none_ttft: float, **methods: float) -> dict[str, Any]:
    """A measurement of `sinkpruner`, of an accuracy, and of other methods, each with its TTFT, at one budget."""
    shared = dict.fromkeys(("task", "questions", "pictures", "precision"), "same")
    shared |= {"machine": "Some Processor", "threads": 2, "versions": {"sinkprune": "0.1.0", "onnxruntime": "1.31.0"}}
    point = {"relative": 0.9, "ci95": [0.8, 0.9], "mean_visual_tokens": 35.0}
    rows = {
        name: {"retain-64": point | {"accuracy": accuracy, "ttft_ms": {"median": ttft}}}
        for name, ttft in {"sinkpruner": none_ttft / 2, **methods}.items()
    }
    none = {"accuracy": 0.95, "mean_visual_tokens": 256.0, "ttft_ms": {"median": none_ttft}}
    report = shared | {"none": none, "methods": rows}
    return {"date": date, "commands": [date], "instructions": "avx2 avx512f avx512_bf16", "report": report}


def test_rows_measured_later_stand_among_the_others() -> None:
    kept = measured_rows(0.9, "2026-01-31", 50.0, dart=20.0, fastv=25.0)
    new = measured_rows(0.9, "2026-02-01", 60.0, random=20.0, fastv=20.0)
    merged = figure_rows.with_rows(kept, new, ["random", "fastv"], ["sinkpruner", "random", "dart", "fastv"])
    assert (merged["date"], merged["commands"]) == ("2026-01-31", ["2026-02-01"])
    text = figure_tables.methods_full(merged)
    assert text.startswith(
        f"Measured on {WHERE}; `random`, `fastv` on {WHERE.replace('2026-01-31', '2026-02-01')}:\n"
    )
    assert [line.split("`")[1] for line in text.splitlines()[5:]] == ["sinkpruner", "random", "dart", "fastv"]
    # Each row's speed-up is over the unpruned time of its own day.
    times = figure_tables.ttft_full(merged)
    assert "| `random` | 20.0 (3.00x) |\n| `dart` | 20.0 (2.50x) |\n| `fastv` | 20.0 (3.00x) |\n" in times
    assert "`random`, `fastv`: `none` 60.0 ms" in times
    # Those of another program or machine are refused.
    new = measured_rows(0.91, "2026-01-31", 50.0, dart=20.0)
    new["report"]["none"]["accuracy"], new["report"]["threads"] = 0.94, 1
    with pytest.raises(UsageError, match=r"differ in threads, none, sinkpruner at retain-64\. Measure"):
        figure_rows.with_rows(kept, new, ["dart"], ["sinkpruner", "dart"])


def test_the_pages_hold_what_was_measured_last() -> None:
    """A figure typed by hand, a table that was not written again, and one without a place fail here."""
    kept = {path.stem: json.loads(path.read_text("utf-8")) for path in (figures.ROOT / figures.KEPT).glob("*.json")}
    names, made = set[str](), re.compile(r"^:::\{figures-table\} (\S+)$", re.MULTILINE)
    for page in figures.pages():
        text = page.read_text("utf-8")
        assert figures.rendered(text, kept) == text, page.name
        names |= {name for _, name, _ in figures.BLOCK.findall(text)} | {*made.findall(text)}
    assert names == {table for part in figure_parts.PARTS.values() for table in part.tables}


def test_every_method_is_measured() -> None:
    # On a tower of one resolution `downsample-ttft` is `downsample`.
    assert sorted([*figure_parts.METHODS.split(","), "downsample-ttft"]) == sorted(ALL_METHODS)
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    assert f" --methods {figure_parts.METHODS}\n" in page.replace("\\\n", "")
