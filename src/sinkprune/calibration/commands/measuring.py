"""Shared parts of the commands that measure a bundle on pictures: options and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from PIL import Image

from sinkprune.calibration.evaluation.replies import choose_combinations
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.questions import Sample
from sinkprune.calibration.tasks import SCENES, TEST_SETS, Item
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import WholeNumber
from sinkprune.contract.command_line.options import CommandParser, PathOrName
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.files.output_files import OutputFile, check_apart
from sinkprune.contract.files.trust import add_sign_option, add_trust_options
from sinkprune.runtime.backends import THREADS
from sinkprune.runtime.backends.known import COMPUTES, KNOWN
from sinkprune.runtime.commands.options import (
    Options,
    add_report_options,
    bundle_parser,
    check_memory,
    check_report_options,
    name_list,
)
from sinkprune.runtime.families import load_family
from sinkprune.runtime.loading import check_kind
from sinkprune.runtime.media.images import add_fit_option

S = TypeVar("S", Item, Sample)
LIMIT = WholeNumber("--limit", 1, 10**9)
OWN_TEST_SETS = f"or a test set of this package: {', '.join(TEST_SETS)} (default: {SCENES})"


@dataclass(frozen=True)
class OpenTask(Generic[S]):
    """A bundle and the questions or moments that it is measured on."""

    bundle: Bundle
    items: list[S]
    combinations: list[Combination]
    unreachable: list[Combination]
    """Combinations of the chosen methods and budgets that the bundle does not hold."""


def task_parser(name: str, description: str, examples: str, *, limit: str, drawn: str) -> CommandParser:
    """Return a parser with the questions and plans to measure; `limit` is help, `--plot` draws what `drawn` names."""
    parser = bundle_parser(name, description, examples)
    add = parser.add_argument
    add("--data", type=PathOrName, default=SCENES, help=f"questions about pictures: FILE.jsonl, {OWN_TEST_SETS}")
    add("--methods", type=name_list, help="comma-separated (default: all of the bundle)")
    add("--budgets", type=name_list, help="comma-separated; none is always run (default: all of the bundle)")
    add("--limit", type=LIMIT, metavar="N", help=limit)
    add_report_options(parser, drawn)
    return parser


def add_changing_options(parser: CommandParser) -> None:
    """Add the options of loading, and `--sign`, of commands that measure plans and write them to the bundle.

    Backends that run built engines only are no choices.
    """
    add = parser.add_argument
    backends = [name for name, spec in KNOWN.items() if spec.runs_new_budgets]
    add("--backend", choices=backends, default="ort-cpu", help="engine library (default: ort-cpu)")
    add("--compute", choices=COMPUTES, help="the type of the computation, as in sinkprune-run (default: fastest)")
    add_fit_option(parser)
    add("--threads", type=THREADS, help="CPU threads (default: all cores)")
    add("--skip-sums", action="store_true", help="compare file sizes only, not their sha256")
    add_trust_options(parser)
    add_sign_option(parser, "the bundle")


def check_answers(bundle: Bundle) -> None:
    """Raise `UsageError` for a robot policy, with the commands that measure one."""
    check_kind(bundle, acts=False, instead="sinkprune-calibrate attention or sinkprune-act")


def open_task(
    options: Options,
    new_tokens: int,
    load: Callable[[Bundle, str, int | None], list[S]],
    *others: OutputFile,
    may_act: bool = False,
) -> OpenTask[S]:
    """Read the bundle and the questions, and check all that can be checked before the bundle is loaded.

    `load` reads the data. `others` are outputs besides the report. Raises `BundleError`, `BudgetError`, `TaskError`,
    `OutputError` and `TooLittleMemoryError`, and `UsageError` for a robot policy, unless it `may_act`.
    """
    check_report_options(options, [Path(options.data)], *others)
    bundle = read_runnable(options.bundle, options.trust)
    if not may_act:
        check_answers(bundle)
    combinations, unreachable = choose_combinations(bundle.manifest, options.methods or [], options.budgets or [])
    with status("checking the questions"):
        items = load(bundle, options.data, options.limit)
    check_apart([path for path, _ in (*options.outputs, *others)], (file for item in items for file in item.files))
    check_unpruned_memory(options, bundle, items[0].load_images(), items[0].prompt, new_tokens)
    return OpenTask(bundle, items, combinations, unreachable)


def check_unpruned_memory(
    options: Options, bundle: Bundle, pictures: Sequence[Image.Image], prompt: str = "", new_tokens: int = 0
) -> None:
    """Check the memory that one unpruned request takes; raises `TooLittleMemoryError` and `ImageError`."""
    method, family = next(iter(bundle.manifest.plans)), load_family(bundle.manifest, options.fit)
    check_memory(options, bundle, [*map(family.layout, pictures)], method, [UNPRUNED], prompt, new_tokens)
