"""`generate` and `stream`, the calls that a pipeline and its sessions have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from sinkprune.contract.checks.arguments import check_callable, check_type
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.observer import NOBODY, Observer
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import Request, check_request_options
from sinkprune.runtime.stream import Stream
from sinkprune.runtime.text.prompt import Text


class Answering(ABC):
    """What answers requests. Subclasses build a request, and return the stream of its answer."""

    @abstractmethod
    def new_request(
        self, image: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], **options: Any
    ) -> Request:
        """Return the checked request that `stream` answers; takes what `stream` takes, except `observer`.

        The default of `max_new_tokens` is lower where engines were built for shorter answers.
        """

    @abstractmethod
    def answer(self, request: Request, observer: Observer = NOBODY) -> Stream:
        """Return the stream of a request, with each step reported to `observer`; raises what `stream` does."""

    def generate(
        self,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        *,
        on_text: Callable[[str], None] | None = None,
        observer: Observer = NOBODY,
        **options: Any,
    ) -> Answer:
        """Return the whole answer, with the `options` of `stream`. `on_text` receives each piece of text."""
        check_request_options(options, "on_text", "observer")
        if on_text is not None:
            check_callable("on_text", on_text)
        return self.stream(image, prompt, observer=observer, **options).rest(on_text)

    def stream(
        self,
        image: PictureLike | Sequence[PictureLike],
        prompt: str | Sequence[str],
        *,
        observer: Observer = NOBODY,
        **options: Any,
    ) -> Stream:
        """Return the answer's text as a stream of pieces; after the last, `Stream.answer` is the whole `Answer`.

        `image` is a Pillow image, a uint8 [height,width,3] array, a file, a `Clip` or a `VideoFile`, or a list of
        these. `prompt` follows the images. A list of texts surrounds them: one text before each image, and one after
        the last. `options` are the fields of `Request`: `budget`, `method`, `max_new_tokens`, `min_new_tokens`,
        `stop`, `system`, `history`, `tools`, `tool_call_id`, `temperature`, `top_p`, `seed`, `repetition_penalty`,
        `presence_penalty`, `frequency_penalty`, `deadline_ms`, and `schema`, `regex` or `choice` for the form of the
        answer; and `order`, "bgr" for arrays with OpenCV's order of channels. `observer` receives the result of each
        step.

        Raises at once `TypeError`, `UsageError` (`OptionError` for an unknown option), `PromptError`, `BudgetError`,
        and `ImageError` for an object that is no picture. Reading the first piece raises `ImageError`, `PromptError`,
        `PruningError` and `NumericsError`, and later pieces `UsageError` where the tokenizer cannot write the form.
        """
        began = time.perf_counter()
        check_request_options(options, "observer")
        check_type("observer", observer, (Observer,), "an Observer")
        stream = self.answer(self.new_request(image, prompt, **options), observer)
        stream.count_from(began)
        return stream
