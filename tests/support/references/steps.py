"""A question to a pipeline, and what each step of its answer gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.families import Family, TowerInput
from sinkprune.runtime.families.qwen_processor import Qwen3Processor, QwenProcessor
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.chain import EncodedPicture
from sinkprune.runtime.steps.decoding import Prefill
from sinkprune.runtime.steps.prompt_rows import PromptRows

Array = np.ndarray[Any, Any]
QUESTION = "What is in the picture?"


class Watched(Observer):
    """Keeps what every step gives."""

    pictures: Sequence[TowerInput]
    features: Sequence[EncodedPicture]
    rows: PromptRows
    prefill: Prefill
    answer: Answer

    def __init__(self) -> None:
        self.logits: list[Array] = []

    def seen(self, pictures: Sequence[TowerInput]) -> None:
        self.pictures = pictures

    def encoded(self, pictures: Sequence[EncodedPicture]) -> None:
        self.features = pictures

    def laid_out(self, rows: PromptRows) -> None:
        self.rows = rows

    def prefilled(self, result: Prefill) -> None:
        self.prefill = result

    def chose(self, token: int, logits: Array) -> None:
        self.logits.append(np.array(logits))

    def answered(self, answer: Answer) -> None:
        self.answer = answer


def watched(pipeline: Pipeline, photo: Any, question: str | Sequence[str] = QUESTION, **options: Any) -> Watched:
    """All steps of an answer."""
    watched = Watched()
    pipeline.generate(photo, question, observer=watched, **options)
    return watched


def ask(
    pipeline: Pipeline,
    photo: Image.Image | Sequence[Image.Image],
    budget: str,
    new_tokens: int,
    question: str | Sequence[str] = QUESTION,
    method: str = "sinkpruner",
) -> tuple[Answer, Array]:
    """The answer, exactly `new_tokens` long, and the logits [new_tokens,vocab] of all its tokens."""
    options = {"method": method, "budget": budget, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    steps = watched(pipeline, photo, question, **options)
    return steps.answer, np.stack(steps.logits)


def tower_output(pipeline: Pipeline | LoadedModel, picture: Picture) -> tuple[Array, Array, Array]:
    """Tokens [G,N,D], norms and salience [G,N] that the graph `vision` gives of a picture."""
    given = _vision(pipeline, picture)
    return given["tokens"], given["norms"], given["salience"]


def deepstack_output(pipeline: Pipeline, picture: Picture) -> Array | None:
    """[sets,G,N,d]: the features beside its tokens that the graph `vision` gives of a picture, if it has any."""
    given = _vision(pipeline, picture)
    return np.stack(np.split(given["deepstack"], 3, axis=-1)) if "deepstack" in given else None


def _vision(pipeline: Pipeline | LoadedModel, picture: Picture) -> dict[str, Array]:
    backend, inputs = pipeline.chain.backend, pipeline.family.inputs(picture)
    given = pipeline.chain.vision({name: backend.tensor(array) for name, array in inputs.items()})
    return {name: backend.numpy(tensor) for name, tensor in given.items()}


def layout_of(family: Family, size: tuple[int, int]) -> VisualLayout:
    """The layout of an image of `size` (width, height)."""
    return family.layout(Image.new("RGB", size))


def patch_grid(pipeline: Pipeline, picture: Picture) -> list[int]:
    """Return how many patches Qwen's processor makes of a picture, along time, height and width."""
    manifest = pipeline.bundle.manifest
    processor = Qwen3Processor if manifest.family == "qwen3-vl" else QwenProcessor
    return list(processor(manifest.processor).grid(picture.size))
