"""Answers the requests of all clients: prepares a few at a time, and runs the model in one thread, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from threading import Condition, Thread

from sinkprune.contract.errors import SinkpruneError
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.media.image_bytes import ImageBytes
from sinkprune.runtime.media.images import MOST_PIXELS
from sinkprune.runtime.pipeline import Answering
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.pictures import PictureLike
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.stream import Stream
from sinkprune.runtime.system import trim_heap
from sinkprune.serving.body_fields import ApiError, shutting_down

_PREPARED = 2
"""The most requests that are being prepared, or are prepared and hold pictures; one more of a higher priority."""
_PIXELS_AT_ONCE = MOST_PIXELS
"""The most pixels of pictures that are decoded at once: those of one picture of the largest size."""
_FEW_PIXELS = 1 << 23
"""The most pixels of the one more of a higher priority: a frame of 3840x2160. More would be too much memory."""
_LARGE = 1 << 24
"""The pixels of a picture whose memory is worth returning: a later picture takes new memory, which is slower."""


class State(Enum):
    """How far a job is."""

    WAITING = auto()
    """It holds its bytes only."""
    PREPARING = auto()
    """Its pictures are decoded, its text is tokenized, and the form of its answer is compiled."""
    READY = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(eq=False)
class Job:
    """One request of a client, and where its answer goes. The scheduler's threads call the functions."""

    request: Request
    priority: int
    observer: Observer
    on_text: Callable[[str], None]
    """Receives the text of each token, which may be empty."""
    on_end: Callable[[Answer | BaseException], None]
    """Receives the answer, or the error that ended the request."""
    on_start: Callable[[float], None] = lambda ms: None
    """Called when the model starts with it, with the milliseconds that preparing it took."""
    answering: Answering | None = None
    """What answers the request, if it is not what the scheduler has for all."""
    fields: frozenset[str] = frozenset()
    """The names of the fields in the client's body."""
    cancelled: bool = False
    """Set when the client has gone away: no further token is generated."""
    arrived: float = field(default_factory=time.perf_counter)
    pixels: int = field(init=False)
    """The most pixels that are held while the request is prepared, as far as its pictures' headers show."""
    state: State = State.WAITING
    stream: Stream | None = None
    """The answer, once the job is being prepared."""
    last_step: int = 0
    prepared_ms: float = 0.0

    def __post_init__(self) -> None:
        self.pixels = max(map(_pixels, self.request.pictures), default=0)

    @property
    def due(self) -> float:
        """When the answer must be complete, by `time.perf_counter`."""
        deadline = self.request.deadline_ms
        return math.inf if deadline is None else self.arrived + deadline / 1e3


class Scheduler:
    """Prepares jobs in threads of their own, a few at a time, and runs the model for one job at a time.

    Jobs with the largest priority go first; all others wait meanwhile. Within a priority, waiting jobs are prepared
    and start in the order of their deadlines and then of their arrival, and started jobs take turns, a token each. A
    job starts only after each started job of its priority had a turn, so that new requests do not stop answers.
    """

    def __init__(self, answering: Answering, *, most_jobs: int, most_active: int) -> None:
        """Start the model's thread. At most `most_jobs` wait or run; `most_active` of them run, with KV caches."""
        self._answering, self._most_jobs, self._most_active = answering, most_jobs, most_active
        # In the order of their arrival, which decides between jobs of one priority and deadline.
        self._jobs: list[Job] = []
        self._changed = Condition()
        self._ends, self._last_start = False, 0
        self._thread = Thread(target=self._run, name="sinkprune answers", daemon=True)
        # Started here, because a machine without free memory starts no thread later.
        for thread in (self._thread, *(Thread(target=self._prepare_all, daemon=True) for _ in range(_PREPARED + 1))):
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; raises `ApiError` with status 429 for a full queue, and 503 after `close`."""
        with self._changed:
            if self._ends:
                raise shutting_down()
            if len(self._jobs) >= self._most_jobs:
                raise ApiError(f"{self._most_jobs} requests wait or run already. Try again later.", status=429)
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """End a job without its answer, if it has not ended."""
        with self._changed:
            job.cancelled = True
            self._changed.notify_all()
        for picture in job.request.pictures:
            if isinstance(picture, ImageBytes):
                picture.cancel()

    @property
    def waiting(self) -> int:
        """The number of jobs that the model has not started with."""
        return sum(job.state is not State.RUNNING for job in [*self._jobs])

    @property
    def active(self) -> int:
        """The number of jobs that the model has started with, and not ended."""
        return sum(job.state is State.RUNNING for job in [*self._jobs])

    def close(self) -> None:
        """End all jobs with an error, and the thread after its current step."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        for step in count(1):
            with self._changed:
                job = self._changed.wait_for(lambda: self._ends or self._next())
                if not isinstance(job, Job):
                    break
                job.last_step = step
                starts = job.state is State.READY
                if starts:
                    job.state, self._last_start = State.RUNNING, step
                    self._changed.notify_all()
            self._step(job, starts=starts)
            # What it refers to is freed before the next step, which may be an hour later.
            del job
        for job in [*self._jobs]:
            self._end(job, shutting_down())

    def _next(self) -> Job | None:
        gone = [job for job in self._jobs if job.cancelled and job.state is not State.PREPARING]
        if gone:
            return gone[0]
        able = [job for job in self._jobs if job.state in (State.READY, State.RUNNING)]
        if not able:
            return None
        most = max(job.priority for job in able)
        ready = [job for job in able if job.priority == most and job.state is State.READY]
        running = [job for job in able if job.priority == most and job.state is State.RUNNING]
        had_turns = all(job.last_step >= self._last_start for job in running)
        has_room = self.active < self._most_active
        if not running or (ready and had_turns and has_room):
            return min(ready, key=_order)
        return min(running, key=lambda job: job.last_step)

    def _next_to_prepare(self) -> Job | None:
        """Return the job to prepare next, or None where none waits or there is no room."""
        waiting = [job for job in self._jobs if job.state is State.WAITING and not job.cancelled]
        if not waiting:
            return None
        job = min(waiting, key=_order)
        preparing = [one for one in self._jobs if one.state is State.PREPARING]
        ready = sorted((one for one in self._jobs if one.state is State.READY and one.pixels), key=_order)
        pixels = sum(one.pixels for one in preparing)
        if len(preparing + ready) < _PREPARED and (not pixels or pixels + job.pixels <= _PIXELS_AT_ONCE):
            return job
        # One more, of a higher priority than all.
        if job.pixels > _FEW_PIXELS or any(one.priority >= job.priority for one in preparing + ready):
            return None
        if len(preparing + ready) > _PREPARED:
            if not ready:
                return None
            # It does not run soon. Later it is prepared again.
            last = ready[-1]
            last.state, last.stream = State.WAITING, None
        return job

    def _prepare_all(self) -> None:
        while True:
            with self._changed:
                job = self._changed.wait_for(lambda: self._ends or self._next_to_prepare())
                if not isinstance(job, Job):
                    break
                job.state = State.PREPARING
            self._prepare(job)
            del job

    def _prepare(self, job: Job) -> None:
        began = time.perf_counter()
        try:
            stream = (job.answering or self._answering).answer(job.request, job.observer)
            stream.count_from(job.arrived)
            stream.step()
            if job.pixels > _LARGE:
                # Each thread has a heap of its own, which would keep the pixels.
                trim_heap()
        except BaseException as error:
            self._end(job, error)
            return
        job.prepared_ms = (time.perf_counter() - began) * 1e3
        with self._changed:
            # Otherwise the server has ended.
            if job.state is State.PREPARING:
                job.stream, job.state = stream, State.READY
            self._changed.notify_all()

    def _step(self, job: Job, *, starts: bool) -> None:
        if job.cancelled or job.stream is None:
            self._end(job, GeneratorExit())
            return
        try:
            if starts:
                job.on_start(job.prepared_ms)
            if (text := job.stream.step()) is not None:
                job.on_text(text)
        except StopIteration as end:
            self._end(job, end.value)
        except BaseException as error:
            self._end(job, error)

    def _end(self, job: Job, outcome: Answer | BaseException) -> None:
        with self._changed:
            if job.state is State.ENDED:
                return
            job.state = State.ENDED
            self._jobs.remove(job)
            self._changed.notify_all()
        if job.stream is not None:
            job.stream.close()
        if isinstance(outcome, (SinkpruneError, ApiError)):
            # Frames refer to the job, and its queue to the error: a cycle that would keep the request's bytes.
            outcome = outcome.with_traceback(None)
        job.on_end(outcome)


def _order(job: Job) -> tuple[int, float]:
    return -job.priority, job.due


def _pixels(picture: PictureLike) -> int:
    """Return how many pixels decoding a picture holds; the frames of a video are as many as the largest picture's."""
    return picture.pixels if isinstance(picture, ImageBytes) else _PIXELS_AT_ONCE
