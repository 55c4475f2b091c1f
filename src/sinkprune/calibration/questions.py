"""Questions about pictures, asked of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from sinkprune.calibration.evaluation.replies import check_questions, generate_answer
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.norms import Moment, load_moments
from sinkprune.calibration.tasks import Item, items_by_picture, load_task, naming
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import ImageError
from sinkprune.policies.options import load_policy
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.options import Options, load_pipeline
from sinkprune.runtime.commands.run import note_files, note_many_pictures
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.media.picture_warnings import PictureFacts, file_facts, picture_facts
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import Wrap
from sinkprune.runtime.steps.observer import NOBODY, Observer
from sinkprune.runtime.steps.prompt_run import Kept

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""The suffixes of a folder's picture files."""


class NamedPicture(NamedTuple):
    """A picture that is loaded on demand."""

    name: str
    """A file's path, or the picture's name in its task."""
    load: Callable[[], Image.Image]
    """Loads it, RGB."""
    facts: PictureFacts


def task_pictures(task: str) -> list[NamedPicture]:
    """Return the pictures of a task, each once; raises `TaskError`."""
    groups = items_by_picture(load_task(task, also="a folder of pictures, "))
    return [NamedPicture(item.picture, item.load_image, item.facts) for item, *_ in groups]


def seen_shares(family: Family, items: Sequence[Item]) -> list[float]:
    """Return the share of its picture that the model sees in each question; raises `ImageError`."""
    shares = {own[0].picture: family.layout(own[0].load_image()).seen_share for own in items_by_picture(items)}
    return [shares[item.picture] for item in items]


def note_items(family: Family, items: Sequence[Item]) -> list[str]:
    """Print and return the notes of `note_many_pictures` on the items' pictures; raises what it raises."""
    return note_many_pictures(family, {item.picture: item.facts for item in items})


def folder_pictures(folder: Path) -> list[NamedPicture]:
    """Return the files in `folder` that end in one of `SUFFIXES`, by name.

    All are decoded once. Raises `ImageError` for a file that is no picture, and for a folder without pictures.
    """
    files = _in_folder(folder)
    return [
        NamedPicture(str(file), partial(read_image, file), picture_facts(image))
        for file in files
        for image in [read_image(file)]
    ]


def _in_folder(folder: Path) -> Iterable[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ImageError(f"'{folder}' cannot be read: {error.strerror}. Give another folder of pictures.") from error
    if not found:
        raise ImageError(f"'{folder}' holds no picture, expected files that end in {', '.join(SUFFIXES)}.")
    return found


Loaded = Pipeline | Policy
Sample = Item | Moment


def load_samples(bundle: Bundle, data: str, limit: int | None) -> list[Sample]:
    """Return the questions of a task, or the moments of a file for a policy; raises `TaskError`."""
    manifest = bundle.manifest
    return [*(load_moments(manifest, Path(data), limit) if manifest.policy else load_task(data, limit))]


def load_measured(options: Options, bundle: Bundle, wrap: Wrap) -> Loaded:
    """Load `bundle` on the chosen backend, with progress on stderr; `wrap` may replace each engine."""
    if bundle.manifest.policy:
        return load_policy(options, bundle, wrap)
    return load_pipeline(options, bundle, wrap)


def ask(loaded: Loaded, sample: Sample, pair: Combination, observer: Observer = NOBODY) -> tuple[Kept, ...]:
    """Return what one method and budget keeps of each picture of a question or moment, whose prefix runs.

    Raises what `Pipeline.generate` and `Policy.act` raise, with the id of the question or moment.
    """
    if isinstance(loaded, Policy) and isinstance(sample, Moment):
        with naming(f"moment '{sample.id}'"):
            return loaded.act(
                sample.cameras,
                sample.prompt,
                sample.state,
                method=pair.method_of(loaded.bundle.manifest),
                budget=pair.budget,
                steps=1,
                seed=0,
                observer=observer,
            ).images
    if isinstance(loaded, Pipeline) and isinstance(sample, Item):
        image = sample.load_image()
        return generate_answer(loaded, image, sample.question, pair, max_new_tokens=1, observer=observer).images
    raise ValueError("policies act on moments, and other models answer questions")


def note_samples(loaded: Loaded, samples: list[Sample]) -> tuple[list[float], list[str]]:
    """Print notes on pictures that the model sees in part, on dark ones of 16 bits, and on files with several frames.

    Returns the share that the model sees of each picture, and the notes. Policies see whole pictures. Raises
    `ImageError`.
    """
    if isinstance(loaded, Policy):
        files = [file for sample in samples if isinstance(sample, Moment) for file in sample.files]
        return [1.0] * len(samples), note_files({file: file_facts(file) for file in files})
    items = _questions(samples)
    notes = note_items(loaded.family, items)
    return seen_shares(loaded.family, items), notes


def check_samples(loaded: Loaded, samples: list[Sample], combinations: Sequence[Combination]) -> None:
    """Check that the model takes every question or moment with all `combinations`, before any runs.

    Raises what `check_questions` raises, and what `Policy.act` raises, with the id of the moment.
    """
    if isinstance(loaded, Pipeline):
        check_questions(loaded, _questions(samples), combinations, 1)
        return
    with status("checking the moments"):
        for moment in samples:
            if not isinstance(moment, Moment):
                continue
            for pair in combinations:
                with naming(f"moment '{moment.id}'"):
                    method = pair.method_of(loaded.bundle.manifest)
                    loaded.check(moment.cameras, moment.prompt, moment.state, method=method, budget=pair.budget)


def _questions(samples: list[Sample]) -> list[Item]:
    return [sample for sample in samples if isinstance(sample, Item)]
