"""`sinkprune-calibrate attention`: whether sink tokens are among the kept, and how sharply text attends to what is
kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sinkprune.calibration.attention.report import AttentionReport, LayerReport, Observation, RunReport, summarise
from sinkprune.calibration.attention.watching import Watch, observe
from sinkprune.calibration.evaluation.asking import choose_combinations
from sinkprune.calibration.evaluation.intervals import Mean
from sinkprune.calibration.evaluation.report import BASELINE, Combination
from sinkprune.calibration.evaluation.sample_size import counted, mean_warnings
from sinkprune.calibration.plots import plot_attention
from sinkprune.calibration.sink_tokens import OUTLIER_PER_MILLE
from sinkprune.calibration.tasks import SCENES, Item, load_task
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import run_command
from sinkprune.contract.command_line.command_parser import CommandParser
from sinkprune.contract.command_line.json_output import prints_json
from sinkprune.contract.command_line.progress_lines import ProgressLines
from sinkprune.contract.files.output_files import check_apart
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.commands import (
    BundleOptions,
    ReportOptions,
    add_report_options,
    bundle_parser,
    check_report_options,
    load_pipeline,
    plain,
    status,
    write_report,
)
from sinkprune.runtime.commands.memory import Planned, check_memory
from sinkprune.runtime.commands.table_console import TableConsole
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.profiling.profile import model_name

_EXAMPLES = """\
examples:
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl --limit 100 --budgets retain-64 \\
      --json attention.json --plot attention.png

`sinkprune evaluate --help` shows a line of FILE.jsonl. The unpruned engines always
run: they are what is compared with. Each method of the bundle is another row.
"""
_PICTURES = 50
"""Without --limit: as many pictures as make the shares steady, and minutes rather than an hour of a large model."""
_WITHOUT = ("fastervlm", "sinkpruner-no-outlier-removal")
"""Methods that drop tokens in front of the LLM as ours does, and leave sink tokens among them."""


@dataclass(kw_only=True)
class _Options(BundleOptions, ReportOptions):
    data: str
    methods: str
    budgets: str
    limit: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sinkprune-calibrate attention` with `arguments`, or the process's own if None; returns the exit code."""
    return run_command(_measure, arguments)


def _measure(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, _Options)
    check_report_options(options, options, [Path(options.data)])
    bundle = read_runnable(options.bundle, options.trust)
    combinations, _ = choose_combinations(bundle.manifest, _names(options.methods), _names(options.budgets))
    with status("checking the questions"):
        items = load_task(options.data, options.limit)
        if options.limit is None:
            items = _first_pictures(items)
    check_apart([path for path, _ in options.outputs], (Path(item.picture) for item in items))
    first, method = items[0], next(iter(bundle.manifest.plans))
    check_memory(options, bundle, Planned([first.load_image()], method, [UNPRUNED], first.question.text, 1))
    watch = Watch()
    pipeline = load_pipeline(options, bundle, watch.wrap)
    report = _report(pipeline, Path(options.data).name, items, _observe(pipeline, watch, items, combinations))
    write_report(options, report, plot_attention)
    if not prints_json(options.json):
        _print(report)
        sys.stdout.write(_advice(bundle.manifest))


def _parser() -> CommandParser:
    parser = bundle_parser(
        "sinkprune calibrate attention",
        "Measure how many sink tokens (those of largest norm) are among the kept ones, and the entropy of the text's "
        "attention on visual tokens at each prune layer, with and without the sanitizer.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--data",
        default=SCENES,
        help="questions about pictures: FILE.jsonl, or a test set that comes along: scenes, wide-scenes (default: "
        "scenes)",
    )
    add("--methods", default="", help="comma-separated (default: all of the bundle)")
    add("--budgets", default="", help="comma-separated; none is always run (default: all of the bundle)")
    add(
        "--limit",
        type=WholeNumber("--limit", 1, 10**9),
        metavar="N",
        help=f"the first N questions (default: those about the first {_PICTURES} pictures)",
    )
    add_report_options(parser, "shares and entropies")
    return parser


def _first_pictures(items: Sequence[Item]) -> list[Item]:
    """The questions about the first `_PICTURES` pictures; says on stderr where that is not all of them."""
    first = set(islice(dict.fromkeys(item.picture for item in items), _PICTURES))
    taken = [item for item in items if item.picture in first]
    if len(taken) < len(items):
        sys.stderr.write(
            f"takes the {len(taken)} questions about the first {_PICTURES} pictures, of {len(items)} questions; "
            f"--limit {len(items)} takes all\n"
        )
    return taken


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _observe(
    pipeline: Pipeline, watch: Watch, items: Sequence[Item], combinations: Sequence[Combination]
) -> dict[Combination, list[Observation]]:
    """What was observed of every question, by combination; the unpruned engines are the first."""
    console = Console(stderr=True)
    found: dict[Combination, list[Observation]] = {pair: [] for pair in (BASELINE, *combinations)}
    with ProgressLines("asking", len(items), "questions") as lines:
        for item in track(items, "asking", console=console, transient=True, disable=not console.is_terminal):
            for pair, own in found.items():
                own.append(observe(pipeline, watch, item, pair))
            lines.update(advance=1)
    return found


def _report(
    pipeline: Pipeline, task: str, items: Sequence[Item], observed: dict[Combination, list[Observation]]
) -> AttentionReport:
    runs = {pair: summarise(own) for pair, own in observed.items()}
    none, methods = runs.pop(BASELINE), dict[str, dict[str, RunReport]]()
    for pair, run in runs.items():
        methods.setdefault(pair.method, {})[pair.budget] = run
    manifest, pictures = pipeline.bundle.manifest, len({item.picture for item in items})
    return AttentionReport(
        model=model_name(manifest.checkpoint.source),
        backend=pipeline.backend.name,
        precision=manifest.precision,
        compute=pipeline.backend.compute,
        task=task,
        questions=len(items),
        pictures=pictures,
        outlier_per_mille=OUTLIER_PER_MILLE,
        none=none,
        methods=methods,
        warnings=mean_warnings(pictures),
    )


def _print(report: AttentionReport) -> None:
    console = TableConsole()
    console.print(
        f"{escaped(report.model)}, {report.precision}, {report.backend}: {escaped(report.task)}, "
        f"{counted(report.questions, 'question')} about {counted(report.pictures, 'picture')}; "
        "± half the 95 % interval\n"
        f"sink tokens: the {report.outlier_per_mille / 10:g} % of each group with the largest norms",
        *report.warnings,
        "\n% of the kept tokens that are sink tokens\n",
        sep="\n",
        markup=False,
    )
    runs = [(UNPRUNED, "", report.none)]
    runs += [(method, budget, run) for method, budgets in report.methods.items() for budget, run in budgets.items()]
    shares = _table("into the LLM", "%", "by salience alone, %", "in the last layer", "%")
    for method, budget, run in runs:
        told = (run.sink_share, run.salience_alone, run.last_sink_share)
        into, alone, last = (_shown(share, 100, 2) for share in told)
        shares.add_row(plain(method), plain(budget), f"{run.rows:.0f}", into, alone, f"{run.last_rows:.0f}", last)
    console.print(shares)
    console.print(
        "\nthe text's attention on visual tokens: entropy in nats (of its mean over heads and text rows; of a "
        "uniform one), and % on sink tokens\n",
        markup=False,
    )
    layers = _table(*(f"layer {layer}" for layer in report.none.layers))
    for method, budget, run in runs:
        layers.add_row(plain(method), plain(budget), *map(_entropies, run.layers.values()))
    console.print(layers)


def _table(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("method", "budget"):
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _entropies(layer: LayerReport) -> str:
    return (
        f"{_shown(layer.entropy, 1, 3)} ({layer.entropy_of_mean.mean:.3f}; {layer.uniform:.3f}), "
        f"{100 * layer.sink_attention.mean:.1f} %"
    )


def _shown(value: Mean, scale: float, digits: int) -> str:
    reach = "" if value.ci95 is None else f" ±{scale * (value.ci95[1] - value.ci95[0]) / 2:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{reach}"


def _advice(manifest: Manifest) -> str:
    """What to export for a row that chooses tokens in front of the LLM and keeps sink tokens; empty where one is."""
    if manifest.any_resolution:
        kept = [name for name, budget in manifest.budgets.items() if not budget.remove_outliers]
        name = next(iter(manifest.budgets)).split("+")[0]
        wanted = f"--budgets {name},{name}+keep-outliers"
    else:
        kept = [method for method in _WITHOUT if method in manifest.plans]
        wanted = f"--methods sinkpruner,{','.join(_WITHOUT)}"
    if kept:
        return ""
    return (
        "\nNothing in this bundle drops tokens in front of the LLM without the sanitizer's outlier removal. For rows "
        f"that do, export with: {escaped(wanted)}\n"
    )
