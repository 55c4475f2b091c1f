"""Whoever wants to watch a request: each of its steps hands over what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sinkprune.contract.precision import Array
from sinkprune.runtime.families import Seen
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.decoding import Prefill
from sinkprune.runtime.steps.encoding import Encoded
from sinkprune.runtime.steps.prompt_rows import PromptRows


class Observer:
    """Is told what the steps of a request give, in their order. Override what you want to know.

    Tensors are in the engine library's own buffers; `Backend.numpy` brings one to the host, which waits for it and so
    adds to the times that are measured.
    """

    def during(self, part: str) -> AbstractContextManager[Any]:
        """What is entered while a part runs: those `PARTS` of `sinkprune.contract.reports.report` that are timed
        then, and `decode`, once for each token behind the first. Parts may lie within others."""
        return nullcontext()

    def seen(self, pictures: Sequence[Seen]) -> None:
        """Inputs of the vision tower and layout of each picture."""

    def encoded(self, pictures: Sequence[Encoded]) -> None:
        """Embeddings, norms, salience and kept tokens of each picture."""

    def laid_out(self, rows: PromptRows) -> None:
        """The rows that the first decoder layer is given, and their positions."""

    def prefilled(self, result: Prefill) -> None:
        """Caches, the rows each layer ran on, and those that survived each stage."""

    def chose(self, token: int, logits: Array) -> None:
        """A new token's id, and the logits [vocab] it was chosen by; the first are the prefill's."""

    def answered(self, answer: Answer) -> None:
        """The whole answer, with kept sets and milliseconds."""


NOBODY = Observer()
"""Watches nothing."""
