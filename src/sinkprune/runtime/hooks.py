"""The four hooks by which extensions take part in a request. The defaults add nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.budgets import Plan
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import Schedule, VisualLayout, scheduled
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.steps.answer import Answer, DeadlineReport
from sinkprune.runtime.steps.chain import Chain, EncodedPicture, TowerOutput, run_tower
from sinkprune.runtime.steps.decoding import Prefill, PromptRun, StoredRows
from sinkprune.runtime.steps.prompt_rows import PromptRows
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.text.answer_tokens import Sampler
from sinkprune.runtime.writing import Draft, Written, write


class Budgets:
    """Chooses what a request keeps when the vision tower is done, and when its answer ends.

    The default: the requested budget, and up to `max_new_tokens` tokens. A request calls `candidates`, `choose`,
    `first_token`, `finish` after each token, and `ended`.
    """

    timed = False
    """Whether `choose` reads the clock, and must be called when the tower is done and not only enqueued."""

    def __init__(
        self, manifest: Manifest, request: Request, plan: Plan | None, passes: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Choose for a `request` at its `plan`; `passes` are those of its `Tokens`."""
        self.plan, self._manifest, self._request, self._passes = plan, manifest, request, passes
        # The prompt gives the first token, and is the first pass.
        self._most = request.max_new_tokens if passes is None else 1 + len(passes)

    def candidates(self, layouts: Sequence[VisualLayout]) -> list[Schedule]:
        """Return the schedules that the request may run, for pictures of these layouts."""
        return [scheduled(self._request.budget, self.plan, layouts)]

    def choose(self, possible: Sequence[Schedule], text: int) -> Schedule:
        """Choose one of the `candidates` that can run, in their order, for a prompt with `text` tokens of text.

        Called when the vision tower is enqueued, or done if `timed`.
        """
        return possible[0]

    def first_token(self) -> None:
        """Called when the first token is complete."""

    def finish(self, tokens: int) -> str:
        """Return why the answer ends after so many tokens, or passes of a closed list; "" where it may go on."""
        return "length" if tokens >= self._most else ""

    def ended(self, token_ms: Sequence[float], *, reused: bool) -> DeadlineReport | None:
        """Called when the answer is complete, with the milliseconds of each token after the first.

        `reused` is whether rows of its pictures were those of an earlier request.
        """
        return None


class Restored(NamedTuple):
    """What `Rows.restore` has of a prompt."""

    encoded: Sequence[EncodedPicture] | None = None
    """The pictures after the sanitizer and the projector; None where they must run."""
    stored: Sequence[StoredRows] = ()
    """The first rows of the prompt, in each of the first decoder segments."""


class Rows:
    """Restores rows of earlier requests before the prefill, and keeps those of this one after it.

    The default does neither. A request has its own instance.
    """

    reused_towers = 0
    """How many pictures had their tower's output, after `towers`."""

    def knows(self, place: int, picture: Picture, plan: Plan | None) -> bool:
        """Return whether the tower's output for the request's picture in this `place` is known."""
        return False

    def towers(
        self, chain: Chain, plan: Plan | None, pictures: Sequence[TowerInput], clock: Stopwatch
    ) -> list[TowerOutput]:
        """Return the output of a plan's vision tower for each picture; raises what `run_tower` does."""
        return [run_tower(chain, picture.inputs, clock, plan) for picture in pictures]

    def restore(
        self, manifest: Manifest, plan: Plan | None, texts: Sequence[Sequence[int]], question: Sequence[int]
    ) -> Restored:
        """Return what is known of a prompt with these `texts` (token ids) around the pictures, at a plan.

        `question` are the token ids that the plan's sanitizer reads.
        """
        return Restored()

    def keep(self, chain: Chain, run: PromptRun) -> None:
        """Keep what later requests may share; called in the backend's `turn`."""


class Tokens:
    """Decides which tokens may come next, and writes the answer. The default allows any token."""

    complete = False
    """Whether the answer is complete, so that no token may follow."""
    passes: Sequence[Sequence[int]] | None = None
    """The tokens of each pass after the prompt where answers are compared, and not written; else None."""

    def __init__(self, stop: Sequence[int] = (), min_tokens: int = 0) -> None:
        """Allow the `stop` tokens only after `min_tokens`, as transformers does."""
        self._stop, self._min_tokens, self._tokens = np.array([*stop], np.int64), min_tokens, 0

    def allowed(self, vocabulary: int) -> Array | None:
        """Return whether each of so many tokens may come next, as booleans; None where all may."""
        if self._tokens >= self._min_tokens:
            return None
        mask = np.ones(vocabulary, np.bool_)
        mask[self._stop[self._stop < vocabulary]] = False
        return mask

    def accept(self, token: int) -> None:
        """Add `token` to the answer."""
        self._tokens += 1

    def first(self, sampler: Sampler, logits: Array) -> list[int]:
        """Return the first token, or none for answers that are not written token by token."""
        return [sampler(logits, self.allowed(logits.size))]

    def write(self, draft: Draft) -> Generator[str | None, None, Written]:
        """Write the answer after its prompt; yields pieces of text, and None after other passes."""
        return write(draft)


class Observer:
    """Receives the result of each step of a request, in order. Override the methods that you need.

    Tensors are in the engine library's own buffers. `Backend.numpy` copies one to the host; it waits for the device
    and so adds to the measured times.
    """

    during: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Returns a context that is entered while a part runs, from the part's name. Parts may be nested.

    A part is one of the `PARTS` of `sinkprune.runtime.steps.answer`; `decode`, once for each token after the first,
    or for each pass over a closed list; or `step_0`, `step_1`, ..., the denoising steps of a policy.
    """

    def seen(self, pictures: Sequence[TowerInput]) -> None:
        """Receives the inputs of the vision tower and the layout of each picture."""

    def encoded(self, pictures: Sequence[EncodedPicture]) -> None:
        """Receives embeddings, norms, salience and kept tokens of each picture."""

    def laid_out(self, rows: PromptRows) -> None:
        """Receives the input rows of the first decoder layer, and their positions."""

    def prefilled(self, result: Prefill) -> None:
        """Receives the KV caches, the number of rows of each layer, and the rows that survived each stage."""

    @property
    def reads_logits(self) -> bool:
        """Whether `chose` is overridden; if not, logits of a greedy answer stay on the device."""
        return type(self).chose is not Observer.chose

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


class Hooks(NamedTuple):
    """The hooks of one request."""

    budgets: Budgets
    rows: Rows
    tokens: Tokens
    seen: Observer
    """Receives the result of each step."""
