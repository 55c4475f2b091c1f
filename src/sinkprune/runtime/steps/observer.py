"""Callbacks for the intermediate results of a request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sinkprune.contract.precision import Array
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.chain import EncodedPicture
from sinkprune.runtime.steps.decoding import Prefill
from sinkprune.runtime.steps.prompt_rows import PromptRows


class Observer:
    """Receives the result of each step of a request, in order. Override the methods that you need.

    Tensors are in the engine library's own buffers. `Backend.numpy` copies one to the host; it waits for the device
    and so adds to the measured times.
    """

    def during(self, part: str) -> AbstractContextManager[Any]:
        """Return a context that is entered while a part runs. Parts may be nested.

        A part is one of the `PARTS` of `sinkprune.runtime.steps.answer`; `decode`, once for each token after the
        first, or for each pass over a closed list; or `step_0`, `step_1`, ..., the denoising steps of a policy.
        """
        return nullcontext()

    def seen(self, pictures: Sequence[TowerInput]) -> None:
        """Receives the inputs of the vision tower and the layout of each picture."""

    def encoded(self, pictures: Sequence[EncodedPicture]) -> None:
        """Receives embeddings, norms, salience and kept tokens of each picture."""

    def laid_out(self, rows: PromptRows) -> None:
        """Receives the input rows of the first decoder layer, and their positions."""

    def prefilled(self, result: Prefill) -> None:
        """Receives the KV caches, the number of rows of each layer, and the rows that survived each stage."""

    def chose(self, token: int, logits: Array) -> None:
        """Receives a new token's id, and the logits [vocab] that it was chosen by; first those of the prefill.

        Of an answer from a closed list, only the first token.
        """

    def acted(self, actions: Array) -> None:
        """Receives a policy's actions [1,chunk,action_dim] as its expert gives them, normalised."""

    def answered(self, answer: Answer) -> None:
        """Receives the whole answer, with kept sets and milliseconds. A policy does not call it."""


NOBODY = Observer()
"""An observer that ignores everything."""
