"""`sinkprune-evaluate`: the accuracy of every method at every budget."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from sinkprune.calibration.evaluation.replies import (
    BASELINE,
    NEW_TOKENS,
    Combination,
    CombinationReport,
    EvaluationReport,
    Reply,
    check_questions,
    evaluation_report,
    plant_in_vision,
    replies_by_question,
)
from sinkprune.calibration.evaluation.statistics import Interval
from sinkprune.calibration.plots import plot_evaluation
from sinkprune.calibration.questions import note_items, open_task, questions_of, task_parser, until_interrupted
from sinkprune.calibration.tasks import with_grey_picture
from sinkprune.contract.checks import counted, escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, write_output
from sinkprune.contract.command_line.table_console import TableConsole, make_table, median_text, plain_text
from sinkprune.contract.files.output_files import OutputFile
from sinkprune.contract.report import in_order_of_rows
from sinkprune.runtime.commands.options import Options, add_most_tokens, load_pipeline
from sinkprune.runtime.commands.reports import interrupted_warnings, progress_bar, write_measured

_EXAMPLES = """\
examples:
  sinkprune-evaluate bundle --limit 100
  sinkprune-evaluate bundle --budgets retain-128,retain-64 --methods sinkpruner \\
      --json accuracy.json --plot accuracy.png
  sinkprune-evaluate bundle --data wide-scenes --fit pad
  sinkprune-evaluate bundle --data kitchen.jsonl --answers replies.jsonl
  sinkprune-evaluate bundle --data kitchen.jsonl --blind      # the accuracy of guessing

a line of FILE.jsonl, `image` relative to the file; `kind` and `id` are optional:
  {"image": "1.jpg", "question": "Is there a cup?", "answer": ["yes", "yeah"], "kind": "existence", "id": "k1"}
  {"image": "1.jpg", "question": "What colour is it?", "options": ["red", "blue"], "answer": "B"}
"""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, Options)
    answers: list[OutputFile] = [(options.answers, (".jsonl",))] if options.answers else []
    new_tokens = options.max_new_tokens or NEW_TOKENS
    bundle, samples, combinations, unreachable = open_task(options, new_tokens, *answers)
    items = questions_of(samples)
    if options.blind:
        items = [*map(with_grey_picture, items)]
    pipeline = load_pipeline(options, bundle, plant_in_vision if options.plant_outliers else None)
    notes = [] if options.blind else note_items(pipeline.family, items)
    most = pipeline.limits.new_tokens if pipeline.limits else NEW_TOKENS
    new_tokens = options.max_new_tokens or min(NEW_TOKENS, most)
    check_questions(pipeline, items, [BASELINE, *combinations], new_tokens)

    def measure() -> Iterator[list[Reply]]:
        with progress_bar("warming up", (1 + len(items)) * (1 + len(combinations)), "answers") as count:
            yield from replies_by_question(
                pipeline,
                items,
                combinations,
                max_new_tokens=new_tokens,
                on_warm_up=lambda pair: count(),
                on_run=lambda pair: count(f"asking with {' '.join(dict.fromkeys(pair))}"),
            )

    by_question, interrupted = until_interrupted(measure(), len(items), "question")
    replies = [reply for own in by_question for reply in own]
    result = evaluation_report(
        pipeline,
        replies,
        unreachable,
        task=Path(options.data).name,
        blind=options.blind,
        planted_outliers=options.plant_outliers,
        max_new_tokens=new_tokens,
        fit=options.fit,
    )
    result = replace(result, warnings=(*interrupted_warnings(interrupted), *result.warnings))

    def write_answers(moved: Options) -> None:
        if moved.answers:
            lines = ""
            for reply in replies:
                line = {"id": reply.id, **reply.combination._asdict(), "reply": reply.text, "right": reply.right}
                lines += json.dumps(line, ensure_ascii=False) + "\n"
            write_output(moved.answers, lines.encode())

    files = ("json", "plot", "answers")
    write_measured(
        options,
        result,
        plot_evaluation,
        lambda: _print_tables(result),
        notes,
        interrupted,
        first=write_answers,
        outputs=files,
    )


def _parser() -> CommandParser:
    parser = task_parser(
        "sinkprune evaluate",
        "Ask the questions of a task with every method and budget, in turn, and count the right answers.",
        _EXAMPLES,
        limit="the first N questions only",
        drawn="accuracy against visual tokens",
    )
    add = parser.group("measurement").add_argument
    add("--blind", action="store_true", help="use grey pictures, to measure the accuracy of guessing")
    add(
        "--plant-outliers",
        action="store_true",
        help="turn the least salient 1 %% of each picture's tokens into high-norm, salient outliers after the tower",
    )
    add_most_tokens(parser, NEW_TOKENS)
    parser.group("output").add_argument(
        "--answers", type=Path, metavar="FILE.jsonl", help="write every reply, a line each"
    )
    return parser


def _print_tables(result: EvaluationReport) -> None:
    console = TableConsole()
    blind = ", every picture replaced by a grey one" if result.blind else ""
    fit = f", --fit {result.fit}" if result.fit else ""
    planted = ", outliers planted in the background" if result.planted_outliers else ""
    console.print(
        f"{escaped(result.model)}, {result.weights.beside(result.precision)}, {result.backend}, "
        f"{counted(result.threads, 'thread')}, {result.machine}\n"
        f"{escaped(result.task)}, {counted(result.questions, 'question')} about "
        f"{counted(result.pictures, 'picture')}{blind}{planted}{fit}",
        markup=False,
    )
    for warning in result.warnings:
        console.print(warning)
    console.print(
        "\nAccuracy in %, medians in ms. In brackets: how many times as fast as none, and 95 % intervals; those of "
        "shares and points are by picture\n"
    )
    console.print(_table(result))
    console.print("\nnone, by kind")
    kinds = make_table(["kind"], ["questions", "accuracy"])
    for kind, part in result.none.by_kind.items():
        kinds.add_row(plain_text(kind), str(part.count), f"{100 * part.accuracy:.1f}{_interval(part.ci95, '.1f')}")
    console.print(kinds)


def _table(result: EvaluationReport) -> Table:
    """Return a row of times and accuracy for each method at each budget, as papers have them."""
    first = next(iter(result.methods), "")
    figures = ["tokens a layer", "prefill", "TTFT", "latency", "accuracy", "share of none's"]
    table = make_table(["budget", "method"], [*figures, f"points more than {first}"])
    table.add_row("none", "", *_cells(result.none, result.none))
    held = [Combination(method, budget) for method, budgets in result.methods.items() for budget in budgets]
    pairs = [*held, *result.unreachable]
    for budget in dict.fromkeys(pair.budget for pair in pairs):
        for method in in_order_of_rows(dict.fromkeys(pair.method for pair in pairs if pair.budget == budget)):
            point = result.methods.get(method, {}).get(budget)
            cells = _cells(point, result.none) if point else ["not held"]
            table.add_row(plain_text(budget), plain_text(method), *cells)
    return table


def _cells(point: CombinationReport, none: CombinationReport) -> list[str]:
    times = ((point.prefill_ms, none.prefill_ms), (point.ttft_ms, none.ttft_ms), (point.latency_ms, none.latency_ms))
    share = "-" if point.relative is None else f"{100 * point.relative:.1f} %{_interval(point.relative_ci95, '.1f')}"
    accuracy = f"{100 * point.accuracy:.1f}{_interval(point.ci95, '.1f')}"
    faster = [f"{median_text(own)} ({base.median / own.median:.2f}x)" for own, base in times]
    versus = point.versus_first
    more = "" if versus is None else f"{100 * versus.mean:+.1f}{_interval(versus.ci95, '+.1f')}"
    return [f"{point.mean_visual_tokens:.1f}", *faster, accuracy, share, more]


def _interval(ci95: Interval | None, form: str) -> str:
    """Return an interval in per cent, in brackets; nothing where resampling few pictures gives it no width."""
    if ci95 is None or ci95[0] == ci95[1]:
        return ""
    low, high = (format(100 * end, form) for end in ci95)
    return f" ({low} to {high})"
