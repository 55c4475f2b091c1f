"""`sinkprune-calibrate attention`: sink tokens among the kept ones, and the entropy of the text's attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from sinkprune.calibration.attention import (
    AttentionObserver,
    AttentionReport,
    LayerMeans,
    Observation,
    RunMeans,
    observe,
    summarise,
)
from sinkprune.calibration.evaluation.replies import BASELINE, Combination, task_head
from sinkprune.calibration.evaluation.statistics import Mean, mean_warnings
from sinkprune.calibration.norms import OUTLIER_PER_MILLE
from sinkprune.calibration.plots import plot_attention
from sinkprune.calibration.questions import (
    Loaded,
    Sample,
    check_samples,
    note_samples,
    open_task,
    task_parser,
    until_interrupted,
)
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import counted, escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.options import Options, load_pipeline
from sinkprune.runtime.commands.reports import interrupted_warnings, progress_bar, write_measured
from sinkprune.runtime.media.picture_warnings import unseen_warnings

_EXAMPLES = """\
examples:
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl --limit 100 --budgets retain-64 \\
      --json attention.json --plot attention.png

`sinkprune evaluate --help` shows a line of FILE.jsonl. The unpruned model always runs, for comparison. Each method
of the bundle is another row. For a robot policy, FILE.jsonl has moments (docs/policies.md).
"""
_PICTURES = 50
"""Pictures without --limit: enough for steady shares, and minutes instead of an hour of a large model."""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = task_parser(
        "sinkprune calibrate attention",
        "Measure how many kept tokens are sink tokens (tokens of largest norm), and the entropy of the text's "
        "attention on visual tokens at each prune layer, with and without the sanitizer.",
        _EXAMPLES,
        limit=f"the first N questions (default: those about the first {_PICTURES} pictures)",
        drawn="shares and entropies",
    )
    options = parser.parse(arguments, Options)
    bundle, items, combinations, _ = open_task(options, 1, may_act=True)
    items = items if options.limit else _first_pictures(items)
    watch, pairs = AttentionObserver(), (BASELINE, *combinations)
    if bundle.manifest.policy:
        loaded: Loaded = Policy.load(bundle, wrap=watch.wrap, **options.loading)
    else:
        loaded = load_pipeline(options, bundle, watch.wrap)
    shares, notes = note_samples(loaded, items)
    check_samples(loaded, items, pairs)

    def measure() -> Iterator[dict[Combination, Observation]]:
        with progress_bar("asking", len(items), "questions") as count:
            for item in items:
                yield {pair: observe(loaded, watch, item, pair) for pair in pairs}
                count()

    observed, interrupted = until_interrupted(measure(), len(items), "question")
    shares, pictures = shares[: len(observed)], [item.picture for item in items[: len(observed)]]
    runs = {pair: summarise(pictures, [own[pair] for own in observed]) for pair in pairs}
    methods: dict[str, dict[str, RunMeans]] = {}
    for pair in combinations:
        methods.setdefault(pair.method, {})[pair.budget] = runs[pair]
    few, unseen = mean_warnings(len(set(pictures))), unseen_warnings(shares, "questions")
    report = AttentionReport(
        **task_head(loaded.bundle.manifest, loaded.backend, Path(options.data).name, pictures),
        outlier_per_mille=OUTLIER_PER_MILLE,
        none=runs[BASELINE],
        methods=methods,
        warnings=(*interrupted_warnings(interrupted), *few, *unseen),
        seen_share=min(shares),
    )
    write_measured(options, report, plot_attention, lambda: _print(report), notes, interrupted)


def _first_pictures(items: Sequence[Sample]) -> list[Sample]:
    first = set(islice(dict.fromkeys(item.picture for item in items), _PICTURES))
    taken = [item for item in items if item.picture in first]
    if len(taken) < len(items):
        sys.stderr.write(
            f"takes the {len(taken)} questions about the first {_PICTURES} pictures, of {len(items)} questions; "
            f"--limit {len(items)} takes all\n"
        )
    return taken


def _print(report: AttentionReport) -> None:
    console = TableConsole()
    console.print(
        f"{escaped(report.model)}, {report.weights.beside(report.precision)}, {report.backend}: "
        f"{escaped(report.task)}, {counted(report.questions, 'question')} about "
        f"{counted(report.pictures, 'picture')}; ± half the 95 % interval\n"
        f"sink tokens: the {report.outlier_per_mille / 10:g} % of each group with the largest norms",
        *report.warnings,
        "\n% of the kept tokens that are sink tokens\n",
        sep="\n",
        markup=False,
    )
    runs = [(UNPRUNED, "", report.none)]
    runs += [(method, budget, run) for method, budgets in report.methods.items() for budget, run in budgets.items()]
    names = ("method", "budget")
    shares = make_table(names, ("into the LLM", "%", "by salience alone, %", "in the last layer", "%"))
    for method, budget, run in runs:
        into, alone, last = (
            _with_interval(share, 100, 2) for share in (run.sink_share, run.salience_alone, run.last_sink_share)
        )
        shares.add_row(
            plain_text(method), plain_text(budget), f"{run.rows:.0f}", into, alone, f"{run.last_rows:.0f}", last
        )
    console.print(shares)
    console.print(
        "\nthe text's attention on visual tokens: entropy in nats (of its mean over heads and text rows; of a "
        "uniform one), and % on sink tokens\n",
        markup=False,
    )
    layers = make_table(names, [f"layer {layer}" for layer in report.none.layers])
    for method, budget, run in runs:
        layers.add_row(plain_text(method), plain_text(budget), *map(_entropies, run.layers.values()))
    console.print(layers)


def _entropies(layer: LayerMeans) -> str:
    return (
        f"{_with_interval(layer.entropy, 1, 3)} ({layer.entropy_of_mean.mean:.3f}; {layer.uniform:.3f}), "
        f"{100 * layer.sink_attention.mean:.1f} %"
    )


def _with_interval(value: Mean, scale: float, digits: int) -> str:
    reach = "" if value.ci95 is None else f" ±{scale * (value.ci95[1] - value.ci95[0]) / 2:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{reach}"
