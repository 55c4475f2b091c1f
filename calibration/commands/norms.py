"""`sinkprune-calibrate norms`: what a vision tower's tokens are like, and whether the outliers are among them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import track

from sinkprune.calibration.norms import NormReport, measure_norms
from sinkprune.calibration.plots import plot_norms
from sinkprune.calibration.tasks import SCENES, load_task
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.command import run_command
from sinkprune.contract.files import check_apart
from sinkprune.contract.terminal import escaped
from sinkprune.contract.trust import trusted_bundle
from sinkprune.runtime.commands import (
    add_report_options,
    bundle_parser,
    check_report_options,
    load_pipeline,
    report_outputs,
    status,
    write_report,
)
from sinkprune.runtime.commands.memory import Planned, check_memory

_EXAMPLES = """\
examples:
  sinkprune-calibrate bundle
  sinkprune-calibrate bundle --task kitchen.jsonl --json norms.json --plot norms.png

what else there is:
  sinkprune-calibrate quantize --help     # int4 and int8 weights, rounded for pictures and prompts of your own
  sinkprune-calibrate schedule --help     # a budget that answers in 250 ms on this machine
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sinkprune-calibrate norms` with `arguments`, or the process's own if None; returns the exit code."""
    return run_command(_measure, arguments)


def _measure(arguments: Sequence[str] | None) -> None:
    parser = bundle_parser(
        "sinkprune-calibrate",
        "Measure the norms of a vision tower's tokens over a task's pictures: are there outliers to be removed?",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("--task", default=SCENES, help="scenes, the test set that comes along, or FILE.jsonl (default: scenes)")
    add_report_options(parser, "the histogram of the norms")
    options = parser.parse_args(arguments)
    check_report_options(options, [Path(options.task)])
    bundle = read_runnable(options.bundle, trusted_bundle(options))
    with status("checking the task"):
        by_picture = groupby(load_task(options.task), key=lambda item: item.picture)
        items = [next(items) for _, items in by_picture]
    check_apart([path for path, _ in report_outputs(options)], (Path(item.picture) for item in items))
    method = next(iter(bundle.manifest.plans))
    check_memory(options, bundle, Planned([items[0].load_image()], method, [UNPRUNED], "", 0))
    pipeline = load_pipeline(options, bundle)
    console = Console(stderr=True)
    shown = track(items, "looking", console=console, transient=True, disable=not console.is_terminal)
    report = measure_norms(pipeline, (item.load_image() for item in shown))
    write_report(options, report, plot_norms)
    sys.stdout.write(escaped(_text(report), keep="\n"))


def _text(report: NormReport) -> str:
    overlap, chance = 100 * report.top_overlap, 100 * report.chance_overlap
    return (
        f"{report.model}: {report.pictures} pictures, {report.tokens} visual tokens\n"
        f"{report.verdict}\n"
        f"Of the 1 % of largest norms, {overlap:.1f} % are among the most salient 1 % (by chance: {chance:.1f} %)\n"
        f"and take {100 * report.top_salience_share:.1f} % of the salience. Rank correlation of norm and salience: "
        f"{report.norm_salience_correlation:.2f}.\n"
    )
