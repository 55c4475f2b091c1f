"""Runs a model or a robot policy on one question or moment, to look at what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sinkprune.calibration.evaluation.replies import check_questions, generate_answer
from sinkprune.calibration.evaluation.report import Combination
from sinkprune.calibration.moments import Moment, load_moments
from sinkprune.calibration.pictures import note_items, seen_shares
from sinkprune.calibration.tasks import Item, load_task, naming
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.command_line.progress import status
from sinkprune.runtime.commands import Options, load_pipeline
from sinkprune.runtime.commands.picture_notes import note_files
from sinkprune.runtime.commands.policy_options import load_policy
from sinkprune.runtime.media.picture_warnings import file_facts
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.policy import Policy
from sinkprune.runtime.steps.chain import Wrap
from sinkprune.runtime.steps.kept import Kept
from sinkprune.runtime.steps.observer import NOBODY, Observer

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
