"""`sinkprune-calibrate schedule`: finds a budget that meets a deadline on this machine, and adds it to a bundle."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sinkprune.calibration.commands.measuring import add_changing_options, add_former_name, check_answers
from sinkprune.calibration.evaluation.sample_size import accuracy_warnings, mean_warnings
from sinkprune.calibration.pictures import note_items
from sinkprune.calibration.scheduling.report import NEAR, ScheduleReport
from sinkprune.calibration.scheduling.report_text import missed_text, report_text
from sinkprune.calibration.tasks import Item, check_own_questions, items_by_picture, load_task
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.checks.fields import to_json
from sinkprune.contract.checks.ranges import RealNumber, WholeNumber
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.command_parser import CommandParser
from sinkprune.contract.command_line.json_output import json_outputs, write_json, write_result
from sinkprune.contract.command_line.progress_lines import status
from sinkprune.contract.command_line.written_files import note_written, write_each
from sinkprune.contract.costs.file import write_costs
from sinkprune.contract.costs.model import Costs
from sinkprune.contract.errors import BudgetError, UsageError
from sinkprune.contract.files.output_files import OutputFile, check_apart, check_outputs
from sinkprune.contract.files.signature import read_private_key
from sinkprune.contract.files.trust import sum_lines
from sinkprune.contract.manifest import BUNDLE
from sinkprune.export.packages import report_missing_package
from sinkprune.runtime.commands import BundleOptions, add_new_tokens, load_pipeline
from sinkprune.runtime.commands.deadline_costs import doubtful_costs, kept_line
from sinkprune.runtime.commands.interrupts import beside_earlier
from sinkprune.runtime.commands.memory import check_memory
from sinkprune.runtime.commands.picture_notes import note_pictures
from sinkprune.runtime.families import load_family
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.steps.picture_warnings import unseen_warnings
from sinkprune.runtime.steps.request import new_request

if TYPE_CHECKING:
    from sinkprune.calibration.scheduling.propose import BudgetTarget
    from sinkprune.calibration.scheduling.request_times import PictureQuestion

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
_MOST_LOST = 0.85
"""The share of attention above which a budget causes a warning."""
_PICTURES = 8
"""Pictures whose attention is measured; a plan's share of it differs little between pictures."""
_DRAWN = (
    f"{_PICTURES} drawn scenes are measured, because no pictures were given. Others may take other times: give yours "
    "with --image or --data."
)


@dataclass(kw_only=True)
class _Options(BundleOptions):
    target_ms: float | None
    budget_tokens: float | None
    new_tokens: int
    name: str | None
    data: Path | None
    limit: int | None
    image: list[Path] | None
    prompt: str | None
    costs: Path | None
    json: Path | None
    dry_run: bool
    force: bool
    seconds: float
    sign: Path | None

    @property
    def wants_budget(self) -> bool:
        """Whether to find a budget, not costs alone."""
        return self.target_ms is not None or self.budget_tokens is not None

    @property
    def outputs(self) -> list[OutputFile]:
        """The files that are written, each with the suffixes it may have."""
        return [*json_outputs(self.json), *([(self.costs, (".json",))] if self.costs else [])]


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, _Options)
    _check_options(options)
    with report_missing_package("adding budgets"), status("loading packages"):
        from sinkprune.calibration.evaluation.replies import check_questions
        from sinkprune.calibration.evaluation.report import BASELINE
        from sinkprune.calibration.scheduling.named_budget import METHOD, add_budget, check_addable, check_name
        from sinkprune.calibration.scheduling.propose import TOKENS_A_LAYER, BudgetTarget, Proposer
        from sinkprune.calibration.scheduling.trials import Trials
    target = BudgetTarget(options.target_ms, options.budget_tokens, options.new_tokens)
    bundle = read_bundle(options.bundle, options.trust)
    check_answers(bundle)
    name, sign = options.name or _name(target), read_private_key(options.sign) if options.sign else None
    check_name(bundle.manifest, name)
    if options.wants_budget and not options.dry_run:
        check_addable(bundle, name, force=options.force, signed=sign is not None)
    with status("checking the pictures"):
        items = load_task(str(options.data), options.limit or _QUESTIONS) if options.data else []
        check_apart([path for path, _ in options.outputs], (Path(item.picture) for item in items))
        named = _prompts(options, items)
    prompts = [prompt for _, prompt in named]
    first = prompts[0]
    layout = load_family(bundle.manifest, options.fit).layout(first.image)
    check_memory(options, bundle, [layout], METHOD, [UNPRUNED], first.question, options.new_tokens)
    with TemporaryDirectory(prefix="sinkprune-") as folder:
        trials = Trials(bundle, Path(folder))
        pipeline = load_pipeline(options, trials.bundle)
        if target.tokens is not None:
            # Known before anything is measured.
            target.check_unmet(layout.all_tokens, TOKENS_A_LAYER)
        notes = list[str]()
        # Own pictures are few.
        if options.data:
            notes = note_items(pipeline.family, items)
            check_questions(pipeline, items, [BASELINE])
        elif options.image:
            files = [Path(file) for file, _ in named]
            notes = note_pictures(pipeline.family, files, [prompt.image for prompt in prompts])
        else:
            notes = [_DRAWN]
            sys.stderr.write(f"note: {_DRAWN}\n")
        shares = [pipeline.family.layout(prompt.image).seen_share for prompt in prompts]
        proposer, report = None, None
        try:
            with status("measuring") as progress:
                if options.wants_budget:
                    proposer = Proposer(trials, pipeline, prompts, options.seconds, progress)
                    report = replace(proposer.propose(name, target, items), seen_share=min(shares))
                else:
                    pipeline.measure_costs(new_request(*first), options.seconds, progress)
        except BudgetError as error:
            if proposer:
                refusal = {
                    "costs": to_json(proposer.times.costs),
                    "error": str(error),
                    "requests": proposer.times.requests,
                    "nearest_target_ms": None if target.ms is None else proposer.nearest,
                    "nearest_budget_tokens": proposer.nearest if target.ms is None else None,
                }
                write_json(options.json, refusal)
            raise
        except KeyboardInterrupt as interrupt:
            costs = proposer.times.costs if proposer else pipeline.costs
            if not costs:
                raise KeyboardInterrupt("no costs were kept: they need all rounds.") from interrupt
            counts = "no budget was added; the costs were measured."
            options, earlier = beside_earlier(options, "json", "costs")
            write_json(options.json, {"costs": to_json(costs), "interrupted": counts})
            raise KeyboardInterrupt(counts + earlier) from interrupt
        finally:
            # Costs are useful even if no budget is found.
            if pipeline.costs:
                sys.stderr.write(doubtful_costs(pipeline.costs, pipeline.replaced_costs, option=""))
                sys.stderr.write(kept_line(pipeline.save_costs(), pipeline.costs))
            if report is None:
                _write_costs(options, proposer.times.costs if proposer else pipeline.costs)
    if report is None:
        write_json(options.json, {"costs": to_json(pipeline.costs)})
        return
    # Only a default name promises a time.
    kept, sha256 = report.meets(target.ms) or bool(options.name), None

    def change_bundle() -> None:
        nonlocal sha256
        if kept and not options.dry_run:
            chosen = report.chosen
            manifest = add_budget(bundle, name, chosen.budget, chosen.stages_after, force=options.force, sign=sign)
            sha256 = BUNDLE.sha256(manifest)

    def write_report() -> None:
        found = {**to_json(report), "sha256": sha256, "notes": notes}
        text = report_text(report) + (_changed_text(options, name, sha256) if kept else "")
        write_result(options.json, found, lambda: sys.stdout.write(text))

    few = [*accuracy_warnings(len(items)), *unseen_warnings(shares, "requests")] if items else []
    if own := {item.picture for item in items} or set(map(str, options.image or [])):
        few += mean_warnings(len(own))
    write_each(
        lambda: _write_costs(options, report.costs),
        change_bundle,
        write_report,
        lambda: _warn([*few, *_doubts(report)]),
    )
    if report.meets(target.ms):
        return
    done = "added, and misses its target" if sha256 else "found and not added"
    raise BudgetError(f"budget '{name}' was {done}: {missed_text(report, target.wanted)}")


def _write_costs(options: _Options, costs: Costs | None) -> None:
    """Write the costs to the file of `--costs`, if both are there."""
    if options.costs and costs:
        write_costs(options.costs, costs)
        note_written(options.costs)


def _changed_text(options: _Options, name: str, sha256: str | None) -> str:
    """Return what became of the bundle: `sha256` is its new sum, if it was changed."""
    folder = escaped(str(options.bundle))
    if sha256 is None:
        return f"{folder}: unchanged{', because of --dry-run' if options.dry_run else ''}\n"
    return (
        f"{folder}: added budget {name}\n{sum_lines(sha256, options.sign)}"
        "The sha256 is new: replace it where you give --sha256 or sha256=, and make this bundle's engines "
        "and thresholds again.\n"
        f"Run the budget: sinkprune-run {folder} --budget {name}, with --image and --prompt\n"
    )


def _doubts(report: ScheduleReport) -> Iterator[str]:
    """Yield a warning for a budget that drops much, and for one whose measured time is far from the predicted."""
    if report.chosen.lost > _MOST_LOST:
        yield (
            f"the budget drops {100 * report.chosen.lost:.1f} % of the text's attention to the picture, so many "
            "answers may be wrong. Compare it with others: sinkprune-evaluate."
        )
    if not report.accurate:
        yield (
            f"the prediction misses the measurement by {100 * abs(report.off):.1f} %, more than {100 * NEAR:.0f} %: "
            "the machine's speed changed meanwhile. Measure again when the machine does nothing else."
        )


def _warn(warnings: Iterable[str]) -> None:
    sys.stderr.write("".join(f"warning: {warning}\n" for warning in warnings))


def _check_options(options: _Options) -> None:
    """Reject options that exclude each other, and outputs that cannot be written."""
    if not options.wants_budget and not options.costs:
        raise UsageError(
            "neither a budget nor costs were requested. Give --target-ms or --budget-tokens for a budget, or --costs "
            "for what requests cost here."
        )
    if options.data and (options.image or options.prompt):
        raise UsageError("--data holds pictures and questions. Leave out --image and --prompt, or --data.")
    if options.limit is not None and options.data is None:
        raise UsageError("--limit counts the questions of --data. Add --data, or leave it out.")
    check_own_questions(options.data)
    read = [*(options.image or []), *([options.data] if options.data else []), *options.key_files]
    check_outputs(options.outputs, read, [options.bundle])


def _name(target: BudgetTarget) -> str:
    """Return the default name of a budget for a target."""
    return f"in-{target.ms:g}ms" if target.ms is not None else f"mean-{target.tokens or 0:g}"


def _prompts(options: _Options, items: Sequence[Item]) -> list[tuple[str, PictureQuestion]]:
    """Return one question about each picture of --data, each --image, or drawn scenes; first one of median length.

    Before each is the name of its picture's file, "" for a scene.
    """
    from sinkprune.calibration.scheduling.request_times import PictureQuestion

    if items:
        chosen = [group[0] for group in items_by_picture(items)[:_PICTURES]]
        prompts = [(item.picture, PictureQuestion(item.load_image(), item.question.prompt)) for item in chosen]
    elif options.image:
        prompts = [
            (str(path), PictureQuestion(read_image(path), options.prompt or _PROMPT)) for path in options.image
        ]
    else:
        from sinkprune.demo.scenes import make_scene

        scenes = [make_scene("validation", number)[1] for number in range(_PICTURES)]
        prompts = [("", PictureQuestion(scene, options.prompt or _PROMPT)) for scene in scenes]
    median = sorted(range(len(prompts)), key=lambda number: len(prompts[number][1].question))[len(prompts) // 2]
    return [prompts[median], *prompts[:median], *prompts[median + 1 :]]


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
    add_former_name(parser, "--questions", "limit", type=_LIMIT)
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
