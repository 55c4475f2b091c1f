"""Answers the requests of all clients in one thread, a prefill or a token at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Condition, Thread

from sinkprune.runtime.answering import Answering
from sinkprune.runtime.server.api_error import ApiError, shutting_down
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import Stream

RETRY_S = 1
"""When a client that was rejected with 429 should try again."""


@dataclass(eq=False)
class Job:
    """One request of a client, and where its answer goes. The scheduler's thread calls the functions."""

    request: Request
    priority: int
    observer: Observer
    on_text: Callable[[str], None]
    """Receives the text of each token, which may be empty."""
    on_end: Callable[[Answer | BaseException], None]
    """Receives the answer, or the error that ended the request."""
    on_start: Callable[[], None] = lambda: None
    answering: Answering | None = None
    """What answers the request, if it is not what the scheduler has for all."""
    fields: frozenset[str] = frozenset()
    """The names of the fields in the client's body."""
    cancelled: bool = False
    """Set when the client has gone away: no further token is generated."""
    number: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    stream: Stream | None = None
    """The answer, once the job has started."""
    last_step: int = 0
    waited_ms: float = 0.0
    """The time between the arrival and the start."""

    @property
    def due(self) -> float:
        """When the answer must be complete, by `time.perf_counter`."""
        deadline = self.request.deadline_ms
        return math.inf if deadline is None else self.arrived + deadline / 1e3

    def in_time(self) -> Request:
        """Return the request with the time that is left of its deadline, because a pipeline counts from its start."""
        self.waited_ms = (time.perf_counter() - self.arrived) * 1e3
        if self.request.deadline_ms is None:
            return self.request
        return replace(self.request, deadline_ms=max(1.0, self.request.deadline_ms - self.waited_ms))

    def from_arrival(self, answer: Answer) -> Answer:
        """Return the answer with the deadline that the client sent, and the deadline's times since the arrival."""
        found, sent, waited = answer.deadline, self.request.deadline_ms, self.waited_ms
        if found is None or sent is None:
            return answer
        measured = found.measured_ms + waited
        return replace(
            answer,
            deadline=replace(
                found,
                deadline_ms=sent,
                met=measured <= sent,
                predicted_first_ms=found.predicted_first_ms + waited,
                first_ms=found.first_ms + waited,
                predicted_ms=found.predicted_ms + waited,
                measured_ms=measured,
            ),
        )


class Scheduler:
    """Runs jobs in one thread.

    Jobs with the largest priority go first; all others wait meanwhile. Within a priority, waiting jobs start in the
    order of their deadlines and then of their arrival, and started jobs take turns, a token each. A job starts only
    after each started job of its priority had a turn, so that new requests do not stop answers.
    """

    def __init__(self, answering: Answering, *, most_jobs: int, most_active: int) -> None:
        """Start the thread. At most `most_jobs` wait or run. `most_active` of them have started, and KV caches."""
        self._answering, self._most_jobs, self._most_active = answering, most_jobs, most_active
        self._jobs: list[Job] = []
        self._changed = Condition()
        self._ends = False
        self._numbers, self._last_start = count(1), 0
        self._thread = Thread(target=self._run, name="sinkprune answers", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; raises `ApiError` with status 429 for a full queue, and 503 after `close`."""
        with self._changed:
            if self._ends:
                raise shutting_down()
            if len(self._jobs) >= self._most_jobs:
                raise ApiError(
                    f"{self._most_jobs} requests wait or run already. Try again later.",
                    status=429,
                    retry_after=RETRY_S,
                )
            job.number = next(self._numbers)
            self._jobs.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job without its answer, if it has not ended."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """The number of jobs that have not started."""
        return sum(job.stream is None for job in [*self._jobs])

    @property
    def active(self) -> int:
        """The number of jobs that have started and not ended."""
        return sum(job.stream is not None for job in [*self._jobs])

    def close(self) -> None:
        """End all jobs with an error, and the thread after its current step."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        for step in count(1):
            with self._changed:
                self._changed.wait_for(lambda: self._ends or self._jobs)
                if self._ends:
                    break
                job = self._next()
                job.last_step = step
            self._step(job)
        for job in [*self._jobs]:
            self._end(job, shutting_down())

    def _next(self) -> Job:
        """Return the job whose turn it is."""
        gone = [job for job in self._jobs if job.cancelled]
        if gone:
            return gone[0]
        most = max(job.priority for job in self._jobs)
        jobs = [job for job in self._jobs if job.priority == most]
        active = [job for job in jobs if job.stream is not None]
        waiting = [job for job in jobs if job.stream is None]
        had_turns = all(job.last_step >= self._last_start for job in active)
        if not active or (waiting and had_turns and self.active < self._most_active):
            return min(waiting, key=lambda job: (job.due, job.number))
        return min(active, key=lambda job: job.last_step)

    def _step(self, job: Job) -> None:
        """Start a job, or generate its next token."""
        try:
            if job.cancelled:
                raise GeneratorExit
            if job.stream is None:
                self._last_start = job.last_step
                job.on_start()
                answering = job.answering or self._answering
                job.stream = answering.answer(job.in_time(), job.observer)
            job.on_text(job.stream.step())
        except StopIteration as end:
            self._end(job, end.value)
        except BaseException as error:
            self._end(job, error)

    def _end(self, job: Job, outcome: Answer | BaseException) -> None:
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
        if job.stream is not None:
            job.stream.close()
        job.on_end(outcome)
