"""`sinkprune-calibrate schedule`: finds a budget that meets a deadline on this machine, and adds it to a bundle."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sinkprune.calibration.evaluation.statistics import accuracy_warnings, mean_warnings
from sinkprune.calibration.questions import (
    PICTURES,
    PictureQuestion,
    add_changing_options,
    check_answers,
    note_items,
    questions_to_measure,
)
from sinkprune.calibration.tasks import Item, check_own_questions, load_task
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks import RealNumber, WholeNumber, escaped, to_json
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import (
    CommandParser,
    json_outputs,
    note_written,
    write_each,
    write_json,
    write_result,
)
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import BudgetError, UsageError
from sinkprune.contract.files.output_files import OutputFile, check_apart, check_outputs
from sinkprune.contract.files.signature import read_private_key
from sinkprune.contract.files.trust import sum_lines
from sinkprune.contract.manifest import BUNDLE
from sinkprune.deadlines.costs import Costs, write_costs
from sinkprune.deadlines.options import doubtful_costs, kept_line
from sinkprune.deadlines.pipeline import Pipeline
from sinkprune.export import report_missing_package
from sinkprune.runtime.commands.options import NO_COSTS, Options, beside_earlier, check_memory
from sinkprune.runtime.commands.reports import add_new_tokens
from sinkprune.runtime.commands.run import note_pictures
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.steps.request import new_request

if TYPE_CHECKING:
    from sinkprune.calibration.schedule_search import BudgetTarget, Proposer

_EXAMPLES = """\
examples:
  sinkprune-calibrate schedule llava-7b --target-ms 250                         # the first token in 250 ms, here
  sinkprune-calibrate schedule llava-7b --target-ms 900 --new-tokens 8 --name in-a-second
  sinkprune-calibrate schedule llava-7b --target-ms 250 --data kitchen.jsonl    # most right answers
  sinkprune-calibrate schedule llava-7b --budget-tokens 64 --image kitchen.jpg --prompt "Is there a cup on the table?"
  sinkprune-calibrate schedule llava-7b --costs costs.json                  # for sinkprune-run --deadline-ms --costs
  sinkprune-run llava-7b --budget in-250ms --image kitchen.jpg --prompt "Is there a cup on the table?"

The command adds the budget to the bundle in place. It writes kilobytes, and no weights. The sha256 of the bundle
changes: build engines again, and sign a signed bundle again with --sign. Run the command on the machine that will
answer, when no other program runs.
"""
_TARGET_MS = RealNumber("--target-ms", 1, 86_400_000, "milliseconds, from 1 to 86400000 (a day)")
_BUDGET_TOKENS = RealNumber("--budget-tokens", 1, 1 << 20, "a mean number of visual tokens a layer, 1 or more")
_SECONDS = RealNumber("--seconds", 0, 86_400, "seconds, from 0 to 86400")
_LIMIT = WholeNumber("--limit", 1, 10**6)
_QUESTIONS = 64
"""Questions of --data that are measured, unless --limit says otherwise."""
_PROMPT = "What is in the picture?"
_DRAWN = (
    f"{PICTURES} drawn scenes are measured, because no pictures were given. Others may take other times: give yours "
    "with --image or --data."
)


class _Options(Options):
    @property
    def wants_budget(self) -> bool:
        return self.target_ms is not None or self.budget_tokens is not None

    @property
    def outputs(self) -> list[OutputFile]:
        return [*json_outputs(self.json), *([(self.costs, (".json",))] if self.costs else [])]


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, _Options)
    _check_options(options)
    with report_missing_package("adding budgets"), status("loading packages"):
        from sinkprune.calibration.evaluation.replies import BASELINE, check_questions
        from sinkprune.calibration.plans import METHOD, Trials, add_budget, check_addable, check_name
        from sinkprune.calibration.schedule_search import (
            TOKENS_A_LAYER,
            BudgetTarget,
            Proposer,
            doubts,
            report_text,
        )
    target = BudgetTarget(options.target_ms, options.budget_tokens, options.new_tokens)
    bundle = read_bundle(options.bundle, options.trust)
    check_answers(bundle)
    default = f"in-{target.ms:g}ms" if target.ms is not None else f"mean-{target.tokens or 0:g}"
    name, sign = options.name or default, read_private_key(options.sign) if options.sign else None
    check_name(bundle.manifest, name)
    if options.wants_budget and not options.dry_run:
        check_addable(bundle, name, force=options.force, signed=sign is not None)
    with status("checking the pictures"):
        items = load_task(str(options.data), options.limit or _QUESTIONS) if options.data else []
        check_apart([path for path, _ in options.outputs], (Path(item.picture) for item in items))
        named = questions_to_measure(items, options.image or [], options.prompt or _PROMPT)
    prompts = [prompt for _, prompt in named]
    first = prompts[0]
    layout = load_family(bundle.manifest, options.fit).layout(first.image)
    check_memory(options, bundle, [layout], METHOD, [UNPRUNED], first.question, options.new_tokens)
    with TemporaryDirectory(prefix="sinkprune-") as folder:
        trials = Trials(bundle, Path(folder))
        pipeline = Pipeline.load(trials.bundle, fit=options.fit, **options.loading)
        if target.tokens is not None:
            # Known before anything is measured.
            target.check_unmet(layout.all_tokens, TOKENS_A_LAYER)
        notes = _notes(options, pipeline, items, named)
        if options.data:
            check_questions(pipeline, items, [BASELINE])
        shares = [pipeline.family.layout(prompt.image).seen_share for prompt in prompts]
        seen = {"notes": notes, "seen_share": min(shares)}
        with _kept_costs(options, pipeline, target, seen) as proposers, status("measuring") as progress:
            if options.wants_budget:
                proposers.append(Proposer(trials, pipeline, prompts, options.seconds, progress))
                report = proposers[0].propose(name, target, items)
            else:
                costs = pipeline.measure_costs(new_request(*first), options.seconds, progress)
        if not options.wants_budget:
            _write_costs(options, costs)
            write_json(options.json, {"costs": to_json(costs), **seen})
            return
    few = [*accuracy_warnings(len(items)), *unseen_warnings(shares, "requests")] if items else []
    if own := {item.picture for item in items} or set(map(str, options.image or [])):
        few += mean_warnings(len(own))
    report = replace(report, seen_share=min(shares), warnings=(*few, *doubts(report)))
    sha256: str | None = None

    def change_bundle() -> None:
        nonlocal sha256
        if not options.dry_run:
            chosen = report.chosen
            manifest = add_budget(bundle, name, chosen.budget, chosen.stages_after, force=options.force, sign=sign)
            sha256 = BUNDLE.sha256(manifest)

    def write_report() -> None:
        found = {**to_json(report), "sha256": sha256, "notes": notes}
        text = report_text(report)
        folder = escaped(str(options.bundle))
        if sha256:
            text += (
                f"{folder}: added budget {name}\n{sum_lines(sha256, options.sign)}"
                "The sha256 is new: replace it where you give --sha256 or sha256=, and make this bundle's engines "
                "again.\n"
                f"Run the budget: sinkprune-run {folder} --budget {name}, with --image and --prompt\n"
            )
        else:
            text += f"{folder}: unchanged{', because of --dry-run' if options.dry_run else ''}\n"
        write_result(options.json, found, lambda: sys.stdout.write(text))

    warnings = "".join(f"warning: {warning}\n" for warning in report.warnings)
    write_each(
        lambda: _write_costs(options, report.costs), change_bundle, write_report, lambda: sys.stderr.write(warnings)
    )


def _notes(
    options: _Options, pipeline: Pipeline, items: Sequence[Item], named: Sequence[tuple[str, PictureQuestion]]
) -> list[str]:
    """Print notes on the pictures, and return them. Own pictures are few."""
    if options.data:
        return note_items(pipeline.family, items)
    if options.image:
        files = [Path(file) for file, _ in named]
        return note_pictures(pipeline.family, files, [prompt.image for _, prompt in named])
    sys.stderr.write(f"note: {_DRAWN}\n")
    return [_DRAWN]


@contextmanager
def _kept_costs(
    options: _Options, pipeline: Pipeline, target: BudgetTarget, seen: Mapping[str, object]
) -> Iterator[list[Proposer]]:
    """Keep and write the costs that the block has measured, if it fails too; they are useful without a budget.

    Yields a list for the block's proposer. If it finds no budget, or after Ctrl-C, the JSON has what was measured,
    with the keys of `seen`.
    """
    proposers: list[Proposer] = []

    def measured() -> Costs | None:
        return proposers[0].costs if proposers else pipeline.costs

    try:
        yield proposers
    except KeyboardInterrupt as interrupt:
        costs = measured()
        if not costs:
            raise KeyboardInterrupt(NO_COSTS) from interrupt
        counts = "no budget was added; the costs were measured."
        moved, earlier = beside_earlier(options, "json", "costs")
        found = {"costs": to_json(costs), "interrupted": counts, **seen}
        write_each(lambda: write_json(moved.json, found), lambda: _write_costs(moved, costs))
        raise KeyboardInterrupt(counts + earlier) from interrupt
    except Exception as error:
        if proposers and isinstance(error, BudgetError):
            [proposer] = proposers
            refusal = {
                "costs": to_json(proposer.costs),
                "error": str(error),
                "requests": proposer.requests,
                "nearest_target_ms": None if target.ms is None else proposer.nearest,
                "nearest_budget_tokens": proposer.nearest if target.ms is None else None,
            }
            write_json(options.json, {**refusal, **seen})
        _write_costs(options, measured())
        raise
    finally:
        if pipeline.costs:
            sys.stderr.write(doubtful_costs(pipeline.costs, option=""))
            sys.stderr.write(kept_line(pipeline.save_costs(), pipeline.costs))


def _write_costs(options: _Options, costs: Costs | None) -> None:
    if options.costs and costs:
        write_costs(options.costs, costs)
        note_written(options.costs)


def _check_options(options: _Options) -> None:
    if not options.wants_budget and not options.costs:
        raise UsageError(
            "neither a budget nor costs were requested. Give --target-ms or --budget-tokens for a budget, or --costs "
            "for what requests cost here."
        )
    given = [name for name in ("name", "sign", "force", "dry_run") if getattr(options, name) not in (None, False)]
    if given and not options.wants_budget:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} is about a budget. Give --target-ms or --budget-tokens, or leave it out.")
    if options.dry_run and options.sign:
        raise UsageError("--sign signs the changed bundle, and --dry-run changes none. Leave out one of the two.")
    if options.data and (options.image or options.prompt):
        raise UsageError("--data holds pictures and questions. Leave out --image and --prompt, or --data.")
    if options.limit is not None and options.data is None:
        raise UsageError("--limit counts the questions of --data. Add --data, or leave it out.")
    check_own_questions(options.data)
    read = [*(options.image or []), *([options.data] if options.data else []), *options.key_files]
    check_outputs(options.outputs, read, [options.bundle])


def _parser() -> CommandParser:
    parser = CommandParser(
        "sinkprune calibrate schedule",
        "Find the budget that meets a time on this machine and drops the least of the text's attention, and add it "
        "to the bundle.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder written by sinkprune-export")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--target-ms", type=_TARGET_MS, metavar="MS", help="the longest time to the last of --new-tokens"
    )
    target.add_argument(
        "--budget-tokens", type=_BUDGET_TOKENS, metavar="N", help="the most visual tokens a layer, on average"
    )
    add_new_tokens(parser, default=1)
    add("--name", help="the budget's name in the bundle (default: for example in-250ms, mean-64)")
    add("--data", type=Path, metavar="FILE.jsonl", help="questions about pictures, as sinkprune evaluate reads them")
    add("--limit", type=_LIMIT, metavar="N", help=f"the first N questions of --data only (default: {_QUESTIONS})")
    add("--image", type=Path, action="append", help="an image file to measure; may be repeated (default: scenes)")
    add("--prompt", help=f"the question about it (default: {_PROMPT})")
    add(
        "--costs",
        type=Path,
        metavar="FILE.json",
        help="write the costs of requests on this machine, which are also kept for later runs",
    )
    parser.add_json("the report")
    add("--dry-run", action="store_true", help="report the budget, and leave the bundle unchanged")
    add("--force", action="store_true", help="replace a budget of that name that was added before")
    add("--seconds", type=_SECONDS, default=5.0, help="about how long to measure each part (default: 5)")
    add_changing_options(parser)
    return parser
