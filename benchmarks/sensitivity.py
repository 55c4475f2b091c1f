"""Measures how accuracy depends on SinkPruner's prune layers and on its sanitizer's share of salient tokens.

    python benchmarks/sensitivity.py
    python benchmarks/sensitivity.py --checkpoint my-llava --data kitchen.jsonl --budgets retain-64 --json found.json

Exports the checkpoint with variants of SinkPruner (`sensitivity_methods/variants.py`), and answers a task's questions
with each. Prints two tables: each prune layer moved by one, and 0 to 100 % of the sanitizer's tokens salient ones.
All variants keep a budget's mean visual tokens a layer. Changes are accuracies minus SinkPruner's on the same
questions, in points, with 95 % intervals by bootstrap over the pictures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sensitivity_methods.variants import SALIENT_PERCENT, SHIFTS, moved_layers
from sinkprune import Pipeline
from sinkprune.calibration.evaluation.replies import BASELINE, Combination, Reply, collect_replies
from sinkprune.calibration.evaluation.statistics import Interval, PictureBootstrap, wilson
from sinkprune.calibration.tasks import SCENES, load_task
from sinkprune.contract.checks import WholeNumber
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.schedule import PictureSchedule
from sinkprune.export import methods
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import THREADS

OWN = "sinkpruner-paper"


@dataclass(frozen=True)
class Variant:
    """One variant at one budget. Accuracies are fractions."""

    method: str
    budget: str
    layers: tuple[int, ...]
    """The 0-based layers after which it prunes."""
    reserve: int
    """Salient tokens of each group."""
    diverse: int
    """Diverse tokens of each group."""
    stages: tuple[int, ...]
    """Visual tokens that survive each stage."""
    mean_visual_tokens: float
    accuracy: float
    ci95: Interval
    change: float
    """Accuracy minus SinkPruner's on the same questions."""
    change_ci95: Interval | None
    """By bootstrap over the pictures; None for a single picture."""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", default="demo/pocket", help="of a LLaVA (default: demo/pocket)")
    add("--data", default=SCENES, help="scenes, or FILE.jsonl (default: scenes)")
    add("--limit", type=WholeNumber("--limit", 1, 10**9), metavar="N", help="the first N questions only")
    add("--budgets", default="retain-64,retain-32", help="comma-separated (default: retain-64,retain-32)")
    add("--threads", type=THREADS, default=1, help="CPU threads (default: 1)")
    add("--json", type=Path, metavar="FILE.json", help="write what was found as JSON")
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json))
    budgets = tuple(options.budgets.split(","))
    # Makes the variants known as methods.
    methods.__path__.append(str(Path(__file__).parent / "sensitivity_methods"))
    with tempfile.TemporaryDirectory() as folder:
        pipeline = _exported(options.checkpoint, budgets, Path(folder) / "bundle", options.threads)
        items = load_task(options.data, options.limit)
        pairs = [Combination(method, budget) for method in pipeline.bundle.manifest.plans for budget in budgets]
        replies = collect_replies(pipeline, items, pairs)
    pictures = [item.picture for item in items]
    found = _variants(pipeline, replies, pairs, pictures)
    write_json(options.json, [asdict(variant) for variant in found])
    none = [reply.right for reply in replies if reply.combination == BASELINE]
    sys.stdout.write(
        f"{options.checkpoint}: {len(items)} questions about {len(set(pictures))} pictures; unpruned "
        f"{100 * sum(none) / len(none):.1f} % are right\n\n{_tables(found, budgets)}"
    )


def _exported(checkpoint: str, budgets: tuple[str, ...], folder: Path, threads: int) -> Pipeline:
    """Export and load the checkpoint with SinkPruner and all variants that its depth allows."""
    # The first export is for the depth of the decoder.
    layers = export_bundle(ExportRequest(checkpoint, budgets[:1]), folder).language_model.num_layers
    moved = [shift for shift in SHIFTS if moved_layers(shift, layers) is not None]
    named = (OWN, *moved, *(f"salient-{percent}" for percent in SALIENT_PERCENT))
    export_bundle(ExportRequest(checkpoint, budgets, named), folder, force=True)
    return Pipeline.load(folder, threads=threads)


def _variants(
    pipeline: Pipeline, replies: Sequence[Reply], pairs: Sequence[Combination], pictures: Sequence[str]
) -> list[Variant]:
    right = {pair: [reply.right for reply in replies if reply.combination == pair] for pair in pairs}
    averaged, manifest = PictureBootstrap(pictures), pipeline.bundle.manifest
    found = []
    for pair in pairs:
        own, base = right[pair], right[Combination(OWN, pair.budget)]
        change = averaged([int(one) - int(other) for one, other in zip(own, base, strict=True)])
        plan = manifest.plans[pair.method][pair.budget]
        if plan.counts is None:
            raise ValueError("variants count when they are exported")
        mean = PictureSchedule.of(plan.counts, 1, plan.cuts).mean(manifest.language_model.num_layers)
        found.append(
            Variant(
                *pair,
                layers=tuple(plan.cuts),
                reserve=plan.counts.reserve,
                diverse=plan.counts.diverse,
                stages=plan.counts.stages,
                mean_visual_tokens=float(mean),
                accuracy=sum(own) / len(own),
                ci95=wilson(sum(own), len(own)),
                change=change.mean,
                change_ci95=change.ci95,
            )
        )
    return found


def _tables(found: Sequence[Variant], budgets: Sequence[str]) -> str:
    by_pair = {(variant.method, variant.budget): variant for variant in found}
    first = by_pair[OWN, budgets[0]]
    moved = [("as they are", OWN), *((shift.replace("-", " "), shift) for shift in SHIFTS)]
    shared = [(f"{percent} %", f"salient-{percent}") for percent in SALIENT_PERCENT]
    places = first.reserve + first.diverse
    shared.insert(2, (f"{100 * first.reserve / places:.0f} %, as it is", OWN))
    lines = _table("prune layers", [row for row in moved if (row[1], budgets[0]) in by_pair], by_pair, budgets)
    lines += ["", *_table("places for salient tokens", shared, by_pair, budgets)]
    return "\n".join(lines) + "\n"


def _table(
    heading: str,
    rows: Sequence[tuple[str, str]],
    by_pair: dict[tuple[str, str], Variant],
    budgets: Sequence[str],
) -> list[str]:
    """Return a Markdown table with a row for each variant: its counts, accuracy and change at each budget."""
    head = [heading, *(f"`{budget}`: {what}" for budget in budgets for what in ("keeps", "% right", "change"))]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, method in rows:
        layers = ", ".join(map(str, by_pair[method, budgets[0]].layers))
        cells = [f"{name} ({layers})" if heading == "prune layers" else name]
        for budget in budgets:
            variant = by_pair[method, budget]
            cells += [_kept(variant), _accuracy(variant), "" if method == OWN else _change(variant)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _kept(variant: Variant) -> str:
    return f"{variant.reserve} + {variant.diverse}; {', '.join(map(str, variant.stages))}"


def _accuracy(variant: Variant) -> str:
    low, high = variant.ci95
    return f"{100 * variant.accuracy:.1f} ±{50 * (high - low):.1f}"


def _change(variant: Variant) -> str:
    if variant.change_ci95 is None:
        return f"{100 * variant.change:+.1f}"
    low, high = variant.change_ci95
    return f"{100 * variant.change:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


if __name__ == "__main__":
    sys.exit(main())
