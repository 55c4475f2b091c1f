"""Measuring a bundle on questions about pictures, or on moments of a robot: options, checks, and the measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from PIL import Image

from sinkprune.calibration.evaluation.replies import (
    Combination,
    check_questions,
    choose_combinations,
    generate_answer,
)
from sinkprune.calibration.tasks import (
    SCENES,
    TEST_SETS,
    Item,
    Moment,
    items_by_picture,
    load_moments,
    load_task,
    naming,
)
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import WholeNumber, counted
from sinkprune.contract.command_line.options import CommandParser, PathOrName
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import ImageError
from sinkprune.contract.files.output_files import OutputFile, check_apart
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.options import Options, bundle_parser, check_memory
from sinkprune.runtime.commands.reports import (
    NO_QUESTION,
    add_report_options,
    check_report_options,
    name_list,
    note_many_pictures,
)
from sinkprune.runtime.commands.run import note_files
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.hooks import NOBODY, Observer
from sinkprune.runtime.loading import check_kind
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.media.picture_warnings import PictureFacts, file_facts, picture_facts
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.decoding import Kept

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""The suffixes of a folder's picture files."""
LIMIT = WholeNumber("--limit", 1, 10**9)
OWN_TEST_SETS = f"or a test set of this package: {', '.join(TEST_SETS)} (default: {SCENES})"
Loaded = Pipeline | Policy
Sample = Item | Moment
Measured = TypeVar("Measured")


def task_parser(name: str, description: str, examples: str, *, limit: str, drawn: str) -> CommandParser:
    """Return a parser with the questions and plans to measure; `limit` is help, `--plot` draws what `drawn` names."""
    parser = bundle_parser(name, description, examples)
    add = parser.group("picture and question").add_argument
    add("--data", type=PathOrName, default=SCENES, help=f"questions about pictures: FILE.jsonl, {OWN_TEST_SETS}")
    add("--limit", type=LIMIT, metavar="N", help=limit)
    add = parser.group("budget").add_argument
    add("--methods", type=name_list, help="comma-separated (default: all of the bundle)")
    add("--budgets", type=name_list, help="comma-separated; none is always run (default: all of the bundle)")
    add_report_options(parser, drawn)
    return parser


def check_answers(bundle: Bundle) -> None:
    """Raise `UsageError` for a robot policy, with the commands that measure one."""
    check_kind(bundle, acts=False, instead="sinkprune-calibrate attention or sinkprune-act")


def open_task(
    options: Options, new_tokens: int, *others: OutputFile, may_act: bool = False
) -> tuple[Bundle, list[Sample], list[Combination], list[Combination]]:
    """Read the bundle and the questions, or moments for a policy, and check what can be checked before it is loaded.

    Returns both, the chosen combinations, and those that the bundle does not hold. `others` are outputs besides the
    report. Raises `BundleError`, `BudgetError`, `TaskError`, `OutputError` and `TooLittleMemoryError`, and
    `UsageError` for a robot policy, unless it `may_act`.
    """
    check_report_options(options, [Path(options.data)], *others)
    bundle = read_runnable(options.bundle, options.trust)
    if not may_act:
        check_answers(bundle)
    combinations, unreachable = choose_combinations(bundle.manifest, options.methods or [], options.budgets or [])
    with status("checking the questions"):
        moments = bundle.manifest.policy is not None
        data, limit = options.data, options.limit
        items = [*(load_moments(bundle.manifest, Path(data), limit) if moments else load_task(data, limit))]
    check_apart([path for path, _ in (*options.outputs, *others)], (file for item in items for file in item.files))
    check_unpruned_memory(options, bundle, items[0].load_images(), items[0].prompt, new_tokens)
    return bundle, items, combinations, unreachable


def check_unpruned_memory(
    options: Options, bundle: Bundle, pictures: Sequence[Image.Image], prompt: str = "", new_tokens: int = 0
) -> None:
    """Check the memory that one unpruned request takes; raises `TooLittleMemoryError` and `ImageError`."""
    method, family = next(iter(bundle.manifest.plans)), load_family(bundle.manifest, options.fit)
    check_memory(options, bundle, [*map(family.layout, pictures)], method, [UNPRUNED], prompt, new_tokens)


def note_items(family: Family, items: Iterable[Item]) -> list[str]:
    """Print and return the notes of `note_many_pictures` on the items' pictures; raises what it raises."""
    return note_many_pictures(family, {item.picture: item.facts for item in items})


def seen_shares(family: Family, items: Sequence[Item]) -> list[float]:
    """Return the share of its picture that the model sees in each question; raises `ImageError`."""
    shares = {own[0].picture: family.layout(own[0].load_image()).seen_share for own in items_by_picture(items)}
    return [shares[item.picture] for item in items]


def note_samples(loaded: Loaded, samples: list[Sample]) -> tuple[list[float], list[str]]:
    """Print notes on pictures that the model sees in part, on dark ones of 16 bits, and on files with several frames.

    Returns the share that the model sees of each picture, and the notes. Policies see whole pictures. Raises
    `ImageError`.
    """
    if isinstance(loaded, Policy):
        files = [file for sample in samples if isinstance(sample, Moment) for file in sample.files]
        return [1.0] * len(samples), note_files({file: file_facts(file) for file in files})
    items = questions_of(samples)
    notes = note_items(loaded.family, items)
    return seen_shares(loaded.family, items), notes


def check_samples(loaded: Loaded, samples: list[Sample], combinations: Sequence[Combination]) -> None:
    """Check that the model takes every question or moment with all `combinations`, before any runs.

    Raises what `check_questions` raises, and what `Policy.act` raises, with the id of the moment.
    """
    if isinstance(loaded, Pipeline):
        check_questions(loaded, questions_of(samples), combinations, 1)
        return
    with status("checking the moments"):
        for moment in (sample for sample in samples if isinstance(sample, Moment)):
            for pair in combinations:
                with naming(f"moment '{moment.id}'"):
                    method = pair.method_of(loaded.bundle.manifest)
                    loaded.check(moment.cameras, moment.prompt, moment.state, method=method, budget=pair.budget)


def questions_of(samples: Iterable[Sample]) -> list[Item]:
    """Return the questions among `samples`, which are all of them unless the bundle is a policy."""
    return [sample for sample in samples if isinstance(sample, Item)]


def ask(loaded: Loaded, sample: Sample, pair: Combination, observer: Observer = NOBODY) -> tuple[Kept, ...]:
    """Return what one method and budget keeps of each picture of a question or moment, whose prefix runs.

    Raises what `Pipeline.generate` and `Policy.act` raise, with the id of the question or moment.
    """
    if isinstance(loaded, Policy) and isinstance(sample, Moment):
        method, given = pair.method_of(loaded.bundle.manifest), (sample.cameras, sample.prompt, sample.state)
        with naming(f"moment '{sample.id}'"):
            own = loaded.act(*given, method=method, budget=pair.budget, steps=1, seed=0, observer=observer)
        return own.images
    if isinstance(loaded, Pipeline) and isinstance(sample, Item):
        image = sample.load_image()
        return generate_answer(loaded, image, sample.question, pair, max_new_tokens=1, observer=observer).images
    raise ValueError("policies act on moments, and other models answer questions")


def until_interrupted(
    measurements: Iterable[Measured], total: int, noun: str, nothing: str = NO_QUESTION
) -> tuple[list[Measured], str]:
    """Return the measurements up to Ctrl-C, and a sentence on how many of the `total` count, "" for all of them.

    `noun` is what one is made of. Raises `KeyboardInterrupt` with the sentence `nothing` before the first.
    """
    found: list[Measured] = []
    try:
        for one in measurements:
            found.append(one)
    except KeyboardInterrupt as interrupt:
        if not found:
            raise KeyboardInterrupt(nothing) from interrupt
        return found, f"the report counts the first {len(found)} of {counted(total, noun)}."
    return found, ""


class NamedPicture(NamedTuple):
    name: str
    """A file's path, or the picture's name in its task."""
    load: Callable[[], Image.Image]
    """Loads it, RGB."""
    facts: PictureFacts


def task_pictures(task: str) -> list[NamedPicture]:
    """Return the pictures of a task, each once; raises `TaskError`."""
    groups = items_by_picture(load_task(task, also="a folder of pictures, "))
    return [NamedPicture(item.picture, item.load_image, item.facts) for item, *_ in groups]


def folder_pictures(folder: Path) -> list[NamedPicture]:
    """Return the files in `folder` that end in one of `SUFFIXES`, by name.

    All are decoded once. Raises `ImageError` for a file that is no picture, and for a folder without pictures.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ImageError(f"'{folder}' cannot be read: {error.strerror}. Give another folder of pictures.") from error
    if not files:
        raise ImageError(f"'{folder}' holds no picture, expected files that end in {', '.join(SUFFIXES)}.")
    return [NamedPicture(str(file), partial(read_image, file), picture_facts(read_image(file))) for file in files]
