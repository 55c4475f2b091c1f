"""`sinkprune-calibrate quantize`: quantises a bundle's weights, rounded for pictures and prompts of a user."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinkprune.calibration.plots import plot_quantisation
from sinkprune.calibration.questions import check_answers, note_items
from sinkprune.calibration.tasks import check_own_questions, items_by_picture, load_task
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import RealNumber, WholeNumber, counted, escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text
from sinkprune.contract.files.folders import check_outside, check_replaceable
from sinkprune.contract.files.output_files import check_apart, check_outputs
from sinkprune.contract.files.signature import read_private_key
from sinkprune.contract.files.trust import add_sign_option, add_trust_options, sum_lines
from sinkprune.contract.manifest import BUNDLE
from sinkprune.contract.memory import available_bytes
from sinkprune.contract.precision import BLOCK_SIZES
from sinkprune.export import report_missing_package
from sinkprune.runtime.backends import THREADS, load_backend
from sinkprune.runtime.commands.options import Options, explain_interrupt
from sinkprune.runtime.commands.reports import add_report_options, write_report
from sinkprune.runtime.families import add_fit_option, load_family
from sinkprune.runtime.profiling.plot import import_matplotlib

if TYPE_CHECKING:
    from sinkprune.calibration.quantise import CalibrationCost, QuantisationReport

_EXAMPLES = """\
examples:
  sinkprune-calibrate quantize llava-fp32 --data kitchen.jsonl -o llava-7b-calibrated --weights int4
  sinkprune-calibrate quantize llava-fp32 --data kitchen.jsonl -o small --weights int4 --block-size 32 \\
      --limit 64 --json errors.json --plot errors.png
  sinkprune-calibrate quantize llava-fp32 --data kitchen.jsonl -o llava-7b-int8 --weights int8 --vision-weights fp32

`sinkprune evaluate --help` shows a line of FILE.jsonl. The n-th picture is shown
with its n-th question. Use pictures and questions like those of the application, and none of an evaluation.
Prompts run unpruned. They contain all rows of pruned prompts, so one bundle serves every budget.
"""
_LIMIT = WholeNumber("--limit", 1, 10**6)
_MAX_ERROR = RealNumber("--max-error", 0, 1e9, "0 or more")
_MAX_LAYER_ERROR = RealNumber("--max-layer-error", 0, 1e9, "0 or more")
_SHOWN = 10


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, Options)
    with report_missing_package("quantising"), status("loading packages"):
        from sinkprune.calibration.quantise import quantise_bundle, quantised_forms
        from sinkprune.calibration.weight_graphs import encode_prompts
    check_outputs(options.outputs, [options.data, *options.key_files], [options.bundle, options.output])
    if options.plot:
        import_matplotlib()
    check_replaceable(options.output, BUNDLE, force=options.force)
    check_outside(options.output, options.bundle, BUNDLE)
    bundle = read_bundle(options.bundle, options.trust)
    check_answers(bundle)
    forms = quantised_forms(bundle.manifest, options.weights, options.vision_weights, options.block_size)
    sign = read_private_key(options.sign) if options.sign else None
    with status("checking the pictures"):
        check_own_questions(options.data)
        by_picture = items_by_picture(load_task(str(options.data)))[: options.limit]
        items = [own[number % len(own)] for number, own in enumerate(by_picture)]
        check_apart([path for path, _ in options.outputs], (Path(item.picture) for item in items))
        prompts = encode_prompts(bundle, items, options.fit)
    family = load_family(bundle.manifest, options.fit)
    notes = note_items(family, items)
    with status("checking sums") as progress:
        bundle.verify(progress)
    with explain_interrupt("no bundle was written: it needs all layers."), status("reading") as progress:
        manifest, report = quantise_bundle(
            bundle,
            options.output,
            prompts,
            forms,
            options.max_error,
            options.max_layer_error,
            threads=load_backend("ort-cpu", options.threads).threads,
            force=options.force,
            sign=sign,
            progress=progress,
            on_cost=_print_cost,
        )
    sha256 = BUNDLE.sha256(manifest)

    def print_tables() -> None:
        _print(report)
        size = sum(spec.size for spec in manifest.files.values())
        sys.stdout.write(
            f"{escaped(str(options.output))}: {size / 1e6:.2f} MB, {forms.beside(manifest.precision)}\n"
            + sum_lines(sha256, options.sign)
        )

    write_report(options, report, plot_quantisation, print_tables, {"sha256": sha256, "notes": notes})


def _print_cost(cost: CalibrationCost) -> None:
    minutes, free = cost.seconds / 60, available_bytes()
    # The estimate leaves out reading and writing files, which dominates in small bundles.
    duration = f"about {minutes:.0f} minutes" if minutes >= 2 else "up to two minutes"
    available = f" ({free / 1e9:.1f} GB are free)" if free else ""
    sys.stderr.write(
        f"needs about {cost.bytes / 1e9:.1f} GB of memory{available}, and {duration} on this machine, if it is idle\n"
    )
    sys.stderr.flush()


def _print(report: QuantisationReport) -> None:
    console = TableConsole()
    console.print(
        f"{escaped(report.model)}, weights {report.weights.name}: {counted(report.prompts, 'prompt')} of "
        f"{counted(report.rows, 'row')}{' in all' if report.prompts > 1 else ''}; "
        "relative errors; in brackets, those of rounding to the nearest",
        markup=False,
    )
    worst = f"worst {min(_SHOWN, len(report.layers))} of {len(report.layers)} layers"
    table = make_table((worst, "graph"), ("bits", "relative L2"))
    for layer in report.worst[:_SHOWN]:
        errors = f"{layer.error:.4f} ({layer.to_nearest:.4f})"
        table.add_row(plain_text(layer.matrix), plain_text(layer.graph), str(layer.bits), errors)
    console.print(table)
    ours, nearest_logits = (
        f"relative L2 {error.relative_l2:.4f}, KL {error.kl:.5f}, same first token {100 * error.top_1:.1f} %"
        for error in (report.logits, report.to_nearest)
    )
    console.print(f"logits: {ours}\n   ({nearest_logits})", markup=False)
    for warning in report.warnings:
        console.print(warning)


def _parser() -> CommandParser:
    parser = CommandParser(
        "sinkprune calibrate quantize",
        "Store a bundle's weights in 4 or 8 bits, rounded so that the outputs of layers change least on your "
        "pictures and prompts.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder written by sinkprune-export, with float weights")
    add("--data", type=Path, required=True, metavar="FILE.jsonl", help="questions about pictures, a line each")
    add("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="the folder to write")
    add("--weights", choices=("int8", "int4"), required=True, help="of decoder, projector and head")
    add("--vision-weights", help="of the vision tower: int8, int4, or its present form to keep it (default: int8)")
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        help=f"the most inputs that share a scale in int4 (default: {max(BLOCK_SIZES)})",
    )
    add("--limit", type=_LIMIT, default=32, metavar="N", help="the first N pictures of --data only (default: 32)")
    add(
        "--max-error",
        type=_MAX_ERROR,
        default=0.3,
        metavar="SHARE",
        help="fail if the relative L2 error of the logits is larger (default: 0.3)",
    )
    add(
        "--max-layer-error",
        type=_MAX_LAYER_ERROR,
        default=0.3,
        metavar="SHARE",
        help="the same for each layer's output (default: 0.3)",
    )
    add_fit_option(parser.group("picture and question"))
    add("--threads", type=THREADS, help="CPU threads that graphs run with (default: all cores)")
    add("--force", action="store_true", help="replace an existing bundle")
    add_report_options(parser, "the error of every layer")
    add_trust_options(parser.group("trust"))
    add_sign_option(parser, "the bundle")
    return parser
