"""An answer that is still being generated: its text piece by piece, and a way to stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from sinkprune.contract.errors import UsageError
from sinkprune.runtime.steps.answer import Answer


@dataclass
class StreamState:
    """The state that a stream and the steps of its request share.

    Neither refers to the other, so the last reference to a stream frees its caches at once.
    """

    cancelled: bool = False
    """Set by the reader: the request generates no further token."""
    budget: str | None = None
    """Set by the request when it has chosen its budget."""
    prepared_s: float = 0.0
    """How many seconds the call took that made the stream. A deadline counts them. It does not count the time from
    then until the first piece is read."""

    def began(self) -> float:
        """Return when the request began, by `time.perf_counter`; called when the first piece is requested."""
        return time.perf_counter() - self.prepared_s


class Stream(Generator[str, None, Answer]):
    """The pieces of text of one answer, in order.

        stream = pipeline.stream("kitchen.jpg", "What is on the table?")
        for piece in stream:
            print(piece, end="", flush=True)
        print(stream.answer.ms["latency"])

    Iteration raises what `Pipeline.stream` names. A stream is a generator: the value of the last `StopIteration`, and
    of `yield from`, is the `Answer`, and `close()` ends the request without an answer. Iterate in one thread at a
    time; `cancel` may be called from any thread.
    """

    def __init__(self, steps: Generator[str | None, None, Answer], state: StreamState, began: float) -> None:
        """Wrap the `steps` of a request, which read and write `state`; `began` is that of `count_from`."""
        self._steps, self._state = steps, state
        self._answer: Answer | None = None
        self.count_from(began)

    def count_from(self, began: float) -> None:
        """Let a deadline count the time from `began` until now, by `time.perf_counter`; called before the first
        piece is read."""
        self._state.prepared_s = time.perf_counter() - began

    def send(self, value: None) -> str:
        """Return the next piece of text, as `next` does; after the last, raise `StopIteration` with the answer."""
        while not (piece := self.step()):
            pass
        return piece

    def step(self) -> str | None:
        """Generate one token, and return its text: "" while a character or a stop string is incomplete.

        Return None after another pass, as over a closed list. After the last token, raise `StopIteration` with the
        answer. A program that answers several requests in turn calls this, so that none waits for a whole piece of
        another's text.
        """
        try:
            with _in_one_thread():
                return next(self._steps)
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise

    def throw(
        self, kind: Any, value: BaseException | object = None, traceback: TracebackType | None = None, /
    ) -> NoReturn:
        """End the request with an exception, and raise it."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else kind()
        with _in_one_thread():
            self._steps.throw(error if traceback is None else error.with_traceback(traceback))
        raise RuntimeError("a request went on after an exception")

    def close(self) -> None:
        """End the request at once, without an answer. Use `cancel` to get the answer so far."""
        with _in_one_thread():
            self._steps.close()

    def cancel(self) -> None:
        """End the stream after the current token; any thread may call this, at any time.

        The reader still gets the last pieces of text, and then `answer` with the finish reason `cancelled` and all
        tokens so far. A request that is cancelled before its first token generates one token. In a closed list, the
        first token of each text decides then. Cancelling a complete answer has no effect.
        """
        self._state.cancelled = True

    def rest(self, on_text: Callable[[str], None] | None = None) -> Answer:
        """Iterate to the end, pass each remaining piece of text to `on_text`, and return the whole answer."""
        for piece in self:
            if on_text is not None:
                on_text(piece)
        return self.answer

    @property
    def budget(self) -> str | None:
        """The budget that the request runs at; None until it is chosen, which is before the first piece."""
        return self._state.budget

    @property
    def answer(self) -> Answer:
        """The whole answer, after the last piece. Raises `UsageError` before that, and after `close` or an error."""
        if self._answer is None:
            missing = "Iterate to its end, or call rest(); call cancel() first to end it early"
            if self._state.cancelled:
                missing = "It was cancelled: iterate to its end, or call rest(), for the tokens so far"
            raise UsageError(
                f"the stream has no answer yet. {missing}. A stream that was closed, or that raised an error, has no "
                "answer."
            )
        return self._answer


@contextmanager
def _in_one_thread() -> Iterator[None]:
    """Explain what Python raises where two threads use a generator at once."""
    try:
        yield
    except ValueError as error:
        if "already executing" in str(error):
            raise RuntimeError(
                "another thread reads this stream. Read it in one thread at a time; cancel() is for any thread."
            ) from error
        raise
