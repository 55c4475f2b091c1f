"""Bundles as a model of `lmms-eval`, the harness that compares multimodal LLMs.

    pip install --editable '.[cpu,lmms-eval]'     # in the clone
    lmms-eval --model sinkprune --model_args bundle=llava-7b,budget=retain-64 --tasks pope,mme,gqa

A task's prompt and longest answer must fit the model's positions together; `--gen_kwargs max_new_tokens=32` shortens
MMBench's 1024. The harness finds this module through the entry point group `lmms_eval.models`. Importing it needs
the harness.

A task gives images, which may be several, or video files. The bundle must take as many (`--max-images` of the
export); video needs a family that has it (Qwen). Texts with one `<image>` or `<video>` for each have them there, and
others after them all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from lmms_eval.api.model import lmms
from PIL import Image
from rich.console import Console
from rich.progress import track

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.checks import type_name
from sinkprune.contract.errors import ImageError, UsageError
from sinkprune.runtime.media.video_file import VideoFile
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.pictures import PictureLike

_MAX_NEW_TOKENS = 128
"""For tasks without a longest answer."""
_PLACE = re.compile("<(?:image|video)>")
"""Where a picture stands in a task's text, as in MuirBench."""


def manifest() -> Any:
    """Return the place of the model's class, for the entry point of the group `lmms_eval.models`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="sinkprune", simple_class_path=f"{__name__}.SinkpruneModel")


class SinkpruneModel(lmms):  # type: ignore[misc]
    """A bundle with one method at one budget, as a model of lmms-eval.

    It answers questions about images and video files, one question at a time.
    """

    is_simple = True

    def __init__(
        self,
        bundle: str,
        method: str = "sinkpruner",
        budget: str = UNPRUNED,
        backend: str = "ort-cpu",
        threads: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Load the bundle. The harness adds `batch_size`, `max_batch_size` and `device` to those of `--model_args`.

        The backend decides the device. Raises `BundleError`, `BackendError`, `BudgetError` and `UsageError`.
        """
        super().__init__()
        if str(batch_size) != "1":
            raise UsageError(f"the batch size is {batch_size}; a bundle answers one question at a time, give 1.")
        self._pipeline = Pipeline.load(str(bundle), backend=backend, threads=threads)
        # Raises here instead of at the first question.
        self._pipeline.bundle.manifest.plan(method, budget)
        self._method, self._budget = method, budget

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the replies to the harness's requests, in their order.

        Raises `ImageError` for pictures that are neither images nor files, `UsageError` for beams, and what
        `Pipeline.generate` raises: for more pictures than the bundle takes, and for video that it does not take.
        """
        turns = track(requests, f"{self._method} {self._budget}", console=Console(stderr=True), transient=True)
        return [self._reply(*request.args) for request in turns]

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        """Raise `UsageError`: a bundle takes one user turn."""
        raise UsageError("a bundle answers one question, not a conversation. Choose tasks of a single round.")

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Raise `UsageError`: a bundle rates no given replies."""
        raise UsageError(
            "a bundle generates replies and rates no given ones. Choose tasks whose output_type is generate_until, "
            "as that of POPE, MME, GQA, TextVQA and MMBench is."
        )

    def _reply(
        self, context: str, settings: dict[str, Any], doc_to_visual: Any, doc_id: Any, task: str, split: str
    ) -> str:
        try:
            pictures = [_picture(visual) for visual in doc_to_visual(self.task_dict[task][split][doc_id])]
        except ImageError as error:
            raise ImageError(f"question {doc_id} of task '{task}': {error}") from error
        if settings.get("num_beams", 1) not in (1, None):
            raise UsageError(
                f"task '{task}' asks for {settings['num_beams']} beams; a bundle decodes without, give 1."
            )
        sampled = settings.get("do_sample", False)
        answer = self._pipeline.generate(
            tuple(pictures),
            _prompt(context, len(pictures)),
            method=self._method,
            budget=self._budget,
            max_new_tokens=settings.get("max_new_tokens", _MAX_NEW_TOKENS),
            temperature=settings.get("temperature", 1.0) if sampled else 0.0,
            top_p=settings.get("top_p") or 1.0 if sampled else 1.0,
            repetition_penalty=settings.get("repetition_penalty"),
        )
        return _cut(answer.text, settings.get("until") or [])


def _picture(visual: Any) -> PictureLike:
    """Return an image, or the video file that a task names; raises `ImageError` and `VideoError`."""
    if isinstance(visual, Image.Image):
        return visual
    if isinstance(visual, (str, os.PathLike)):
        return VideoFile(visual)
    raise ImageError(f"found a picture of type {type_name(visual)}, expected images and names of video files.")


def _prompt(context: str, pictures: int) -> str | Sequence[str]:
    """Return the texts around the pictures, where `context` has a place for each; otherwise all of it."""
    texts = _PLACE.split(context)
    return texts if pictures and len(texts) == pictures + 1 else context


def _cut(text: str, until: str | list[str]) -> str:
    """Return `text` up to the first of the words that end an answer."""
    for end in [until] if isinstance(until, str) else until:
        text = text.split(end, 1)[0] if end else text
    return text
