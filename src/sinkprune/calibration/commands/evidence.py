"""`sinkprune-calibrate evidence`: finds the thresholds of methods whose counts vary by picture."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from sinkprune.calibration.asking import check_samples, load_measured, load_samples, note_samples
from sinkprune.calibration.changed_bundle import changed_folder, changed_text, check_changeable
from sinkprune.calibration.commands.measuring import LIMIT, add_changing_options, check_unpruned_memory
from sinkprune.calibration.evaluation.report import Combination, task_head
from sinkprune.calibration.evaluation.sample_size import mean_warnings
from sinkprune.calibration.evidence.measuring import NONE, EvidenceRecorder, find_thresholds, set_thresholds
from sinkprune.calibration.evidence.report import EvidenceReport
from sinkprune.calibration.tasks import check_own_questions
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.command_parser import CommandParser
from sinkprune.contract.command_line.json_output import json_outputs, write_result
from sinkprune.contract.command_line.progress_lines import status
from sinkprune.contract.command_line.table_console import TableConsole, make_table, plain_text, progress_bar
from sinkprune.contract.command_line.written_files import write_each
from sinkprune.contract.errors import BudgetError
from sinkprune.contract.files.output_files import check_apart, check_outputs
from sinkprune.contract.files.signature import Sign, read_private_key
from sinkprune.contract.manifest import BUNDLE, Manifest
from sinkprune.runtime.commands import BundleOptions, name_list
from sinkprune.runtime.commands.interrupts import explain_interrupt
from sinkprune.runtime.media.picture_warnings import unseen_warnings

_EXAMPLES = """\
examples:
  sinkprune-calibrate evidence llava-7b --data kitchen.jsonl
  sinkprune-calibrate evidence llava-7b --data kitchen.jsonl --budgets retain-64 --dry-run --json found.json

The command writes the thresholds into the bundle, whose sum changes: build engines afterwards, and sign a signed
bundle again with --sign.
"""


@dataclass(kw_only=True)
class _Options(BundleOptions):
    data: Path
    method: str | None
    budgets: list[str] | None
    limit: int | None
    json: Path | None
    dry_run: bool
    sign: Path | None


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, _Options)
    check_own_questions(options.data)
    check_outputs(json_outputs(options.json), [options.data, *options.key_files], options.folders)
    bundle, sign = (
        read_bundle(options.bundle, options.trust),
        read_private_key(options.sign) if options.sign else None,
    )
    method = _method(bundle.manifest, options.method)
    budgets = options.budgets or [*bundle.manifest.plans[method]]
    for budget in budgets:
        if bundle.manifest.plan(method, budget) is None:
            raise BudgetError(f"'{UNPRUNED}' prunes nothing, expected other budgets. Leave it out of --budgets.")
    if not options.dry_run:
        check_changeable(bundle, signed=sign is not None)
    with status("checking the questions"):
        items = load_samples(bundle, str(options.data), options.limit)
    check_apart([path for path, _ in json_outputs(options.json)], (file for item in items for file in item.files))
    check_unpruned_memory(options, bundle, items[0].load_images(), items[0].prompt, 1)
    recorder = EvidenceRecorder()
    loaded = load_measured(options, bundle, recorder.wrap)
    shares, notes = note_samples(loaded, items)
    pairs = [Combination(method, budget) for budget in budgets]
    plans = {budget: bundle.manifest.plan(method, budget) for budget in budgets}
    replaced = [budget for budget, plan in plans.items() if plan and plan.evidence and plan.evidence.thresholds]
    added = [budget for budget in budgets if budget not in replaced]
    for pair in pairs:
        # A request needs some.
        set_thresholds(bundle.manifest, pair, NONE, NONE)
        check_samples(loaded, items, [pair])
    kept = "nothing was kept, and the bundle is unchanged: thresholds need all questions."
    with explain_interrupt(kept), progress_bar("asking", len(items) * len(budgets), "questions") as count:
        found = {pair.budget: find_thresholds(loaded, recorder, items, pair, count) for pair in pairs}
    head = task_head(bundle.manifest, loaded.backend, options.data.name, [item.picture for item in items])
    report = EvidenceReport(
        **head,
        method=method,
        budgets=found,
        warnings=(*mean_warnings(head["pictures"]), *unseen_warnings(shares, "questions")),
        seen_share=min(shares),
    )
    names = {name: ", ".join(own) for name, own in (("added", added), ("replaced", replaced)) if own}
    what = "; ".join(f"{name} the thresholds of {own}" for name, own in names.items())
    sha256: str | None = None

    def change_bundle() -> None:
        nonlocal sha256
        # A bundle is changed only after all budgets are measured.
        sha256 = None if options.dry_run else BUNDLE.sha256(_write(bundle, sign))

    def write_report() -> None:
        found = {**to_json(report), "sha256": sha256, "notes": notes}
        text = changed_text(options.bundle, what, sha256, options.sign, dry_run=options.dry_run)
        write_result(options.json, found, lambda: _print(report, text))

    write_each(change_bundle, write_report)


def _method(manifest: Manifest, name: str | None) -> str:
    """Return the method `name`, or the only one whose counts vary; raises `BudgetError`."""
    varying = [method for method, plans in manifest.plans.items() if any(plan.evidence for plan in plans.values())]
    if name is not None:
        manifest.plan(name, UNPRUNED)
    if name in varying or (name is None and len(varying) == 1):
        return name or varying[0]
    held = f"it holds {', '.join(varying)}. Choose one with --method."
    if not varying:
        held = "it holds none. Export one: sinkprune-export CHECKPOINT -o BUNDLE --methods sinkpruner,occamtoken."
    raise BudgetError(f"expected a method of this bundle whose counts vary by picture; {held}")


def _write(bundle: Bundle, sign: Sign | None) -> Manifest:
    """Write the manifest of `bundle`, with its plans in memory, into its folder, and return it."""
    changed = replace(bundle.manifest, sinkprune_version=version("sinkprune"))
    with changed_folder(bundle, [*changed.files]) as new:
        BUNDLE.write(new, changed, sign)
        BUNDLE.hold(new, changed.files)
    return changed


def _print(report: EvidenceReport, text: str) -> None:
    """Print the report, and then `text`."""
    console = TableConsole()
    console.print(
        f"{escaped(report.model)}, {report.backend}: {escaped(report.task)}, method {escaped(report.method)}, "
        f"{counted(report.questions, 'question')} about {counted(report.pictures, 'picture')}",
        *report.warnings,
        "",
        sep="\n",
        markup=False,
    )
    table = make_table(["budget"], ["thresholds", "visual tokens a layer", "aim", "fewest", "median", "most"])
    for budget, own in report.budgets.items():
        spread = own.visual_tokens
        counts = (own.mean_visual_tokens, own.aimed_visual_tokens, spread.min, spread.median, spread.max)
        thresholds = ", ".join(f"{threshold:.4g}" for threshold in own.thresholds)
        table.add_row(plain_text(budget), thresholds, *(f"{tokens:.1f}" for tokens in counts))
    console.print(table)
    sys.stdout.write(text)


def _parser() -> CommandParser:
    parser = CommandParser(
        "sinkprune calibrate evidence",
        "Find the thresholds at which a method whose counts vary by picture meets the mean of each budget, and write "
        "them into the bundle.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder written by sinkprune-export")
    add(
        "--data",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="questions about pictures like yours, as sinkprune evaluate reads them, whose answers do not matter; or "
        "moments of a robot policy (docs/policies.md)",
    )
    add("--method", help="a method whose counts vary by picture (default: the only one of the bundle)")
    add("--budgets", type=name_list, help="comma-separated, without none (default: all of the method)")
    add("--limit", type=LIMIT, metavar="N", help="the first N questions only")
    parser.add_json("the report")
    add("--dry-run", action="store_true", help="report the thresholds, and leave the bundle unchanged")
    add_changing_options(parser)
    return parser
