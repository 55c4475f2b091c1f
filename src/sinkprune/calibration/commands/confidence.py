"""`sinkprune-calibrate confidence`: finds how sure an answer must be at each budget, for budget `auto`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sinkprune.calibration.commands.measuring import LIMIT, check_answers, check_unpruned_memory
from sinkprune.calibration.confidence.asking import ask_questions, new_thresholds, with_closed_lists
from sinkprune.calibration.confidence.finder import MOST_STEPS
from sinkprune.calibration.confidence.report import ConfidenceReport, CurvePoint, FixedBudget, new_report
from sinkprune.calibration.pictures import note_items, seen_shares
from sinkprune.calibration.tasks import check_own_questions, load_task
from sinkprune.contract.budgets import AUTO, UNPRUNED
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.checks.ranges import RealNumber
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.command_parser import CommandParser
from sinkprune.contract.command_line.json_output import json_outputs, write_result
from sinkprune.contract.command_line.progress_lines import status
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text, progress_bar
from sinkprune.contract.command_line.written_files import note_written, write_each
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.files.output_files import OutputFile, check_apart, check_outputs
from sinkprune.runtime.commands import BundleOptions, bundle_parser, load_pipeline, name_list
from sinkprune.runtime.commands.interrupts import (
    NO_QUESTION,
    beside_earlier,
    explain_interrupt,
    interrupted_warnings,
)
from sinkprune.runtime.confidence.thresholds import describe_ladders, write_thresholds
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.text.answer_form import checked_choices

_EXAMPLES = """\
examples:
  sinkprune-calibrate confidence llava-7b --data kitchen.jsonl --choice yes --choice no --choice red --choice brown
  sinkprune-calibrate confidence llava-7b --data scenes.jsonl --share 0.98 --thresholds thresholds.json
  sinkprune-run llava-7b --budget auto --thresholds thresholds.json --image kitchen.jpg \\
      --prompt "Is there a cup on the table?" --choice yes --choice no

a line of FILE.jsonl; `choice` is the closed list, or give --choice for all lines without one:
  {"image": "1.jpg", "question": "Is there a cup?", "answer": "yes", "choice": ["yes", "no"]}
  {"image": "1.jpg", "question": "What colour is it?", "options": ["red", "blue"], "answer": "B"}
"""
_SHARE = RealNumber("--share", 0, 1, "a share of the unpruned accuracy, from 0 to 1")


@dataclass(kw_only=True)
class _Options(BundleOptions):
    data: Path
    method: str
    budgets: list[str] | None
    limit: int | None
    choice: list[str]
    share: float
    thresholds: Path | None
    json: Path | None


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, _Options)
    outputs: list[OutputFile] = [*json_outputs(options.json)]
    outputs += [(options.thresholds, (".json",))] if options.thresholds else []
    check_outputs(outputs, [options.data, *options.key_files], options.folders)
    choice = checked_choices(options.choice)
    bundle = read_runnable(options.bundle, options.trust)
    check_answers(bundle)
    check_own_questions(options.data)
    manifest = bundle.manifest
    manifest.plan(options.method, UNPRUNED)
    budgets = options.budgets or [*manifest.plans[options.method]]
    for budget in budgets:
        manifest.plan(options.method, budget)
    if set(budgets) <= {UNPRUNED}:
        raise BudgetError(f"'{UNPRUNED}' is the only budget, expected others to start with. Give --budgets.")
    with status("checking the questions"):
        items = with_closed_lists(load_task(str(options.data), options.limit), choice)
    check_apart([path for path, _ in outputs], (Path(item.picture) for item in items))
    check_unpruned_memory(options, bundle, [items[0].load_image()], items[0].question.text, 1)
    pipeline = load_pipeline(options, bundle)
    notes = note_items(pipeline.family, items)
    with explain_interrupt(NO_QUESTION), progress_bar("asking", len(items), "questions") as count:
        names, means, asked = ask_questions(pipeline, items, options.method, budgets, count)
    complete = len(asked.right)
    counts = f"the report counts the first {complete} of {counted(len(items), 'question')}."
    interrupted = "" if complete == len(items) else counts
    if interrupted and options.thresholds:
        # Few questions give other thresholds, and a file of them looks like any other.
        interrupted += " No thresholds were written: they need all questions."
        options = replace(options, thresholds=None)
    items = items[:complete]
    with status("comparing thresholds"):
        report = new_report(pipeline, options.data.name, options.method, options.share, names, means, asked)
    shares = seen_shares(pipeline.family, items)
    unseen = unseen_warnings(shares, "questions")
    earlier = ""
    if interrupted:
        options, earlier = beside_earlier(options, "json")
    report = replace(
        report, warnings=(*interrupted_warnings(interrupted), *report.warnings, *unseen), seen_share=min(shares)
    )

    def keep_thresholds() -> None:
        if options.thresholds:
            write_thresholds(options.thresholds, new_thresholds(pipeline, options.method, report.chosen.least))
            note_written(options.thresholds)

    def print_tables() -> None:
        _print(report)
        sys.stdout.write(describe_ladders(manifest, options.method) + "\n")

    value = {**to_json(report), "interrupted": interrupted or None, "notes": notes}
    write_each(keep_thresholds, lambda: write_result(options.json, value, print_tables))
    if interrupted:
        raise KeyboardInterrupt(interrupted + earlier)


def _print(report: ConfidenceReport) -> None:
    console = TableConsole()
    console.print(
        f"{escaped(report.model)}, {report.weights.beside(report.precision)}, {report.backend}: "
        f"{escaped(report.task)}, {counted(report.questions, 'question')} about "
        f"{counted(report.pictures, 'picture')}",
        *report.warnings,
        f"\n{AUTO}: cross-validated over {report.folds} parts of the "
        f"{'pictures' if report.pictures > 1 else 'questions'}; up to {MOST_STEPS} steps, each with the confidence "
        "below which the next one runs\n",
        sep="\n",
        markup=False,
    )
    table = make_table(("budget", "steps"), ("accuracy in %", "of none's", "TTFT ms"))
    for name, fixed in report.budgets.items():
        table.add_row(plain_text(name), "", *_cells(fixed))
    for point in report.curve:
        mark = " (chosen)" if point is report.chosen else ""
        table.add_row(f"{AUTO} for {100 * point.share:g} %{mark}", plain_text(describe_steps(point)), *_cells(point))
    console.print(table)
    console.print("\nTTFT: medians of budgets, means of auto\n", markup=False)


def describe_steps(point: CurvePoint) -> str:
    """Return the steps of a point in words, as in "retain-32 below 0.97, none"."""
    *steps, last = point.least
    return ", ".join([*(f"{budget} below {_rounded(point.least[budget])}" for budget in steps), last])


def _rounded(confidence: float) -> str:
    """Return a threshold with as many digits as it needs to differ from 1."""
    return next((text for digits in range(3, 18) if (text := f"{confidence:.{digits}f}") < "1"), "1")


def _cells(row: FixedBudget | CurvePoint) -> tuple[str, str, str]:
    low, high = (100 * end for end in row.ci95)
    share = "-" if row.relative is None else f"{100 * row.relative:.1f} %"
    return f"{100 * row.accuracy:.1f}, {low:.1f} to {high:.1f}", share, f"{row.ttft_ms:.1f}"


def _parser() -> CommandParser:
    parser = bundle_parser(
        "sinkprune calibrate confidence",
        "Find the confidence below which an answer from a closed list is asked again at a larger budget, for budget "
        "auto.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="questions about pictures, as sinkprune evaluate reads them, with closed lists",
    )
    add("--method", default="sinkpruner", help="pruning method (default: sinkpruner)")
    add("--budgets", type=name_list, help="the budgets to try, comma-separated; none always runs (default: all)")
    add("--limit", type=LIMIT, metavar="N", help="the first N questions only")
    add(
        "--choice",
        action="append",
        default=[],
        metavar="TEXT",
        help="an answer of the closed list of questions without a list of their own; give it twice or more",
    )
    add(
        "--share",
        type=_SHARE,
        default=0.99,
        metavar="SHARE",
        help="the share of the unpruned accuracy to keep (default: 0.99)",
    )
    add("--thresholds", type=Path, metavar="FILE.json", help="write the thresholds, for sinkprune-run --budget auto")
    parser.add_json("the report")
    return parser
