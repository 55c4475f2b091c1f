"""Whose turn it is: priorities, deadlines, turns token by token, limits, and requests that end early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import Any

import pytest
from PIL import Image
from tests.serving.test_chat_request import png
from tests.serving.test_server import until

from sinkprune import Request, Stream
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.hooks import NOBODY, Observer
from sinkprune.runtime.media.image_bytes import ImageBytes
from sinkprune.runtime.pipeline import Answering
from sinkprune.runtime.stream import StreamState
from sinkprune.serving.body_fields import ApiError
from sinkprune.serving.scheduler import Job, Scheduler, State


class Answers(Answering):
    """A stand-in for a pipeline: the answer to a number is as many tokens; it writes down each step of the model."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.prepare: Callable[[str], None] = lambda name: None
        self.steps: list[str] = []
        self.closed: list[str] = []
        self.begun: dict[str, float] = {}
        self.before_step: Callable[[str], None] = lambda name: None

    def new_request(self, image: Any, prompt: Any, **options: Any) -> Request:
        return Request((), (prompt,), **options) if image is None else Request((image,), ("", prompt), **options)

    def answer(self, request: Request, observer: Observer = NOBODY) -> Stream:
        name, tokens = request.texts[-1].split()
        state = StreamState()

        def steps() -> Iterator[str]:
            try:
                self.begun[name] = state.began()
                self.prepared.append(name)
                self.prepare(name)
                yield ""
                for _ in range(int(tokens)):
                    self.before_step(name)
                    self.steps.append(name)
                    yield name
            finally:
                self.closed.append(name)
            return name  # type: ignore[return-value]

        return Stream(steps(), state, 0.0)  # type: ignore[arg-type]


class Rig:
    """A scheduler that waits until all requests of a test are queued."""

    def __init__(self, **limits: int) -> None:
        self.answers, self.go, self.ends = Answers(), Event(), dict[str, object]()
        self.scheduler = Scheduler(self.answers, **{"most_jobs": 64, "most_active": 8, **limits})
        self.answers.before_step = lambda name: self.go.wait(10) and None  # type: ignore[func-returns-value]

    def ask(
        self, name: str, tokens: int, priority: int = 0, picture: Any = None, *, waits: bool = True, **options: Any
    ) -> Job:
        """Send a request; if `waits`, return when it is prepared."""
        request = self.answers.new_request(picture, f"{name} {tokens}", **options)
        job = Job(request, priority, NOBODY, lambda text: None, lambda end: self.ends.update({name: end}))
        self.scheduler.submit(job)
        until(lambda: not waits or job.state not in (State.WAITING, State.PREPARING))
        return job

    def hold_preparing(self) -> None:
        """Let requests that are prepared from now on wait until all run."""
        self.answers.prepare = lambda name: self.go.wait(10) and None  # type: ignore[func-returns-value]

    def run(self) -> str:
        """Let all requests run to their ends; return the steps, a letter each."""
        self.go.set()
        self.wait()
        return "".join(self.answers.steps)

    def wait(self) -> None:
        until(lambda: not self.scheduler.active + self.scheduler.waiting)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go.set()
    rig.scheduler.close()


def blocked(rig: Rig) -> None:
    """Start a request whose first step waits, so that those that follow are queued together."""
    rig.ask("x", 1)
    until(lambda: rig.scheduler.active > 0)


def test_a_larger_priority_goes_first_and_alone_and_equals_take_turns(rig: Rig) -> None:
    blocked(rig)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 0)):
        rig.ask(name, 3, priority)
    assert rig.run() == "x" + "ccc" + "abadbadbd"


def test_a_request_with_priority_interrupts_a_started_answer(rig: Rig) -> None:
    started, late = Event(), Event()

    def before(name: str) -> None:
        if name == "a" and rig.answers.steps.count("a") == 2:
            started.set()
            late.wait(10)

    rig.answers.before_step = before
    rig.ask("a", 5)
    assert started.wait(10)
    rig.ask("b", 3, priority=1)
    late.set()
    rig.wait()
    assert "".join(rig.answers.steps) == "aaa" + "bbb" + "aa"


def test_the_earliest_deadline_starts_first(rig: Rig) -> None:
    blocked(rig)
    rig.ask("a", 1)
    rig.ask("b", 1, deadline_ms=60_000)
    rig.ask("c", 1, deadline_ms=30_000)
    rig.ask("d", 1)
    assert rig.run() == "xcbad"


def header(width: int, height: int) -> ImageBytes:
    """A picture with so many pixels, of which none is decoded."""
    return ImageBytes(png(Image.new("1", (width, height))), "it")


SMALL, FRAME, LARGE = header(8, 6), header(3840, 2160), header(8192, 8192)


def prepared(rig: Rig, count: int) -> str:
    """Wait until so many requests have begun to be prepared; return them after a moment for more."""
    until(lambda: len(rig.answers.prepared) >= count)
    time.sleep(0.05)
    return "".join(rig.answers.prepared)


def test_pictures_are_decoded_when_it_is_their_requests_turn(rig: Rig) -> None:
    """Two requests that wait for the model hold decoded pictures; one more, if its priority is higher than theirs."""
    blocked(rig)
    for name in "abcd":
        rig.ask(name, 1, picture=SMALL, waits=False)
    assert prepared(rig, 3) == "xab"
    rig.ask("e", 1, priority=1, picture=SMALL, waits=False)
    rig.ask("f", 1, priority=1, picture=SMALL, waits=False)
    assert prepared(rig, 4) == "xabe"
    # Then the last of them is prepared again later.
    rig.ask("h", 1, priority=2, picture=SMALL)
    assert prepared(rig, 5) == "xabeh"
    # Requests without pictures hold nothing.
    rig.ask("g", 1, priority=3)
    steps = rig.run()
    assert steps[:4] == "xghe" and sorted(steps) == sorted("xabcdefgh")


@pytest.mark.parametrize("priorities", [(0, 0, 0), (0, 1, 2)])
def test_large_pictures_are_decoded_one_at_a_time(priorities: tuple[int, ...], rig: Rig) -> None:
    """And beside one, a small picture of a higher priority."""
    blocked(rig)
    rig.hold_preparing()
    for name, priority in zip("abc", priorities, strict=True):
        rig.ask(name, 1, priority, LARGE, waits=False)
    assert len(prepared(rig, 2)) == 2
    rig.ask("d", 1, 3, FRAME, waits=False)
    assert len(found := prepared(rig, 3)) == 3 and found[2] == "d"
    rig.run()
    assert {*rig.answers.prepared} == {*"xabcd"}


def test_answers_go_on_while_a_picture_is_decoded(rig: Rig) -> None:
    rig.go.set()
    slow = Event()
    rig.answers.prepare = lambda name: (name == "a" and slow.wait(10) and None) or None  # type: ignore[func-returns-value]
    rig.ask("a", 1, picture=SMALL, waits=False)
    rig.ask("b", 3, waits=False)
    until(lambda: "b" in rig.ends)
    assert rig.answers.steps == [*"bbb"]
    slow.set()
    rig.wait()
    assert rig.ends["a"] == "a"


def test_limits_on_caches_and_on_the_queue() -> None:
    rig, most = Rig(most_active=2, most_jobs=7), []
    blocked(rig)
    rig.answers.before_step = lambda name: most.append(rig.scheduler.active)
    for name in "abcdef":
        rig.ask(name, 4)
    with pytest.raises(ApiError, match="7 requests wait or run already") as refused:
        rig.ask("g", 1)
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    rig.run()
    assert max(most) == 2 and len(rig.ends) == 7
    rig.ask("h", 1)
    rig.wait()
    rig.scheduler.close()


def test_an_end_of_one_request_is_none_of_others(rig: Rig) -> None:
    """Whether its client goes away or it fails."""
    blocked(rig)
    gone = rig.ask("a", 1000)
    rig.ask("b", 3)
    never = rig.ask("c", 1000)
    rig.ask("d", 3)
    rig.scheduler.cancel(never)

    def before(name: str) -> None:
        if name == "d":
            raise ValueError("broken")
        if rig.answers.steps.count("a") == 2:
            rig.scheduler.cancel(gone)

    rig.answers.before_step = before
    steps = rig.run()
    assert steps.count("a") <= 3 and steps.count("b") == 3 and not {"c", "d"} & {*steps}
    assert {*"abd"} <= {*rig.answers.closed}
    assert isinstance(rig.ends["a"], GeneratorExit) and rig.ends["b"] == "b"
    assert isinstance(rig.ends["d"], ValueError)


def test_decoding_ends_for_a_client_that_goes_away(rig: Rig) -> None:
    picture = header(8, 6)
    rig.scheduler.cancel(rig.ask("a", 1, picture=picture))
    with pytest.raises(ImageError, match="nobody needs the image"):
        picture.decoded()


def test_closing_ends_what_waits(rig: Rig) -> None:
    blocked(rig)
    rig.ask("a", 3)
    closing = Thread(target=rig.scheduler.close)
    closing.start()
    until(lambda: rig.scheduler._ends)
    rig.go.set()
    closing.join()
    assert all(isinstance(rig.ends[name], ApiError) for name in rig.ends) and "a" in rig.ends
    with pytest.raises(ApiError) as refused:
        rig.ask("b", 1)
    assert refused.value.status == 503
