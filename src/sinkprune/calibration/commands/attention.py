"""`sinkprune-calibrate attention`: the share of sink tokens among the kept ones, the entropy of the text's attention,
and the heads of methods `sinkpruner-heads` and `sinkpruner-text-heads`."""

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
    check_prune_layers,
    choose_heads,
    observe,
    questions_by_picture,
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
from sinkprune.calibration.tasks import check_own_questions
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import counted, escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import note_written
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text
from sinkprune.export.methods.heads import ChosenHeads, write_heads
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.options import Options, load_pipeline
from sinkprune.runtime.commands.reports import interrupted_warnings, progress_bar, write_measured
from sinkprune.runtime.media.picture_warnings import unseen_warnings

_EXAMPLES = """\
examples:
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl --limit 100 --budgets retain-64 \\
      --json attention.json --plot attention.png
  sinkprune-calibrate attention llava-7b --data kitchen.jsonl --budgets none --heads heads.json
  sinkprune-export llava-hf/llava-1.5-7b-hf -o llava-heads --heads heads.json \\
      --methods sinkpruner,sinkpruner-text-heads

`sinkprune evaluate --help` shows a line of FILE.jsonl. The unpruned model always runs, for comparison. Each method
of the bundle is another row. For a robot policy, FILE.jsonl has moments (docs/policies.md). --heads also asks
each picture at least two different questions, and chooses the heads that look elsewhere for each.
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
    parser.add_argument(
        "--heads",
        type=Path,
        metavar="FILE.json",
        help="choose the attention heads of methods sinkpruner-heads and sinkpruner-text-heads, and write them for "
        "sinkprune-export --heads",
    )
    options = parser.parse(arguments, Options)
    if options.heads:
        check_own_questions(Path(options.data))
    others = [(options.heads, (".json",))] if options.heads else []
    bundle, items, combinations, _ = open_task(options, 1, *others, may_act=True)
    items = items if options.limit else _first_pictures(items)
    asked = []
    if options.heads:
        check_prune_layers(bundle.manifest)
        asked = questions_by_picture(items)
    watch, pairs = AttentionObserver(), (BASELINE, *combinations)
    if bundle.manifest.policy:
        loaded: Loaded = Policy.load(bundle, wrap=watch.wrap, **options.loading)
    else:
        loaded = load_pipeline(options, bundle, watch.wrap)
    shares, notes = note_samples(loaded, items)
    check_samples(loaded, items, pairs)
    heads: list[ChosenHeads] = []

    def measure() -> Iterator[dict[Combination, Observation]]:
        with progress_bar("asking", len(items), "questions") as count:
            for item in items:
                yield {pair: observe(loaded, watch, item, pair) for pair in pairs}
                count()
        if options.heads:
            with progress_bar("comparing questions", sum(map(len, asked)), "questions") as count:
                heads.append(choose_heads(loaded, watch, asked, count))

    observed, interrupted = until_interrupted(measure(), len(items), "question")
    if options.heads and not heads:
        interrupted += " No heads were chosen: they need all questions."
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

    def keep_heads() -> None:
        for chosen in heads:
            write_heads(options.heads, chosen)
            note_written(options.heads)

    def print_tables() -> None:
        _print(report)
        for chosen in heads:
            _print_heads(chosen)

    write_measured(options, report, plot_attention, print_tables, notes, interrupted, first=lambda _: keep_heads())


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


def _print_heads(heads: ChosenHeads) -> None:
    sys.stdout.write("\nheads that look elsewhere for another question, of all: mean divergence in nats\n")
    for layer, own in heads.layers.items():
        found = ", ".join(f"{head} ({own.question_dependence[head]:.2f})" for head in own.chosen) or "none"
        others = [value for head, value in enumerate(own.question_dependence) if head not in own.chosen]
        rest = f"; the others up to {max(others):.2f}" if others else ""
        sys.stdout.write(f"layer {layer}: {found}, of {len(own.question_dependence)}{rest}\n")


def _entropies(layer: LayerMeans) -> str:
    return (
        f"{_with_interval(layer.entropy, 1, 3)} ({layer.entropy_of_mean.mean:.3f}; {layer.uniform:.3f}), "
        f"{100 * layer.sink_attention.mean:.1f} %"
    )


def _with_interval(value: Mean, scale: float, digits: int) -> str:
    reach = "" if value.ci95 is None else f" ±{scale * (value.ci95[1] - value.ci95[0]) / 2:.{digits}f}"
    return f"{scale * value.mean:.{digits}f}{reach}"
