"""Sessions: exact memory between requests about the same pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkprune.contract.checks.arguments import check_type, checks_options
from sinkprune.contract.checks.ranges import WholeNumber
from sinkprune.contract.errors import UsageError
from sinkprune.runtime.answering import Answering
from sinkprune.runtime.loading import StaysInProcess
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.observer import NOBODY, Observer
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.prefix_cache import PrefixCache, SessionRows
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import Stream
from sinkprune.runtime.text.prompt import Text

MAX_BYTES = 256 << 20
"""The default size of a session's memory."""
_BYTES = WholeNumber("max_bytes", 0, 1 << 50)


class Session(StaysInProcess, Answering):
    """Answers requests with a pipeline, and remembers what later requests about the same pictures need again.

        session = Session(pipeline)
        session.generate("kitchen.jpg", "What is on the table?", budget="retain-64")
        session.generate("kitchen.jpg", "Is the kettle on?", budget="retain-64")

    The second answer is the one that `pipeline` gives, and its first token comes sooner. Neither the vision tower nor
    the sanitizer runs again. The decoder's layers before the first that prunes run for the new words only. Then the
    tokens are selected anew, for the new question. `Answer.reused_rows` counts the rows that were not computed again.

    Pictures are recognised by their pixels. Requests also share rows if they have the same text before the pictures,
    the same method, and budgets with the same sanitizer. About another picture, they share the text before it. Times
    of answers that reuse rows of pictures do not correct a pipeline's costs. Any number of threads may share a
    session (docs/sessions.md).
    """

    @checks_options
    def __init__(self, pipeline: Pipeline, max_bytes: int = MAX_BYTES) -> None:
        """Start with an empty memory of at most `max_bytes`. What was used least recently is dropped first.

        Raises `UsageError` for a wrong size and for TensorRT engines of dialect opset20, and `TypeError` for what is
        no `Pipeline`.
        """
        check_type("pipeline", pipeline, (Pipeline,), "a Pipeline, as in Session(Pipeline.load('llava-7b'))")
        if not pipeline.backend.resumes:
            raise UsageError(
                f"sessions need engines that take new rows after earlier ones, and those of dialect opset20 on "
                f"'{pipeline.backend.name}' do not. Use the pipeline without a session, or export with --dialect "
                "opset24 and build again."
            )
        self.pipeline, self._prefixes = pipeline, PrefixCache(_BYTES.check(max_bytes))

    @property
    def nbytes(self) -> int:
        """The bytes in use, on the device and the host."""
        return self._prefixes.nbytes

    def new_request(
        self, image: PictureLike | Sequence[PictureLike], prompt: str | Sequence[Text], **options: Any
    ) -> Request:
        return self.pipeline.new_request(image, prompt, **options)

    def answer(self, request: Request, observer: Observer = NOBODY) -> Stream:
        return self.pipeline.answer(request, observer, lambda: SessionRows(self._prefixes))
