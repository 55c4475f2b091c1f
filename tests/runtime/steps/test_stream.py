"""Streams: pieces of whole characters, the answer after them, stop tokens that nobody sees, and an early end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline, Stream, UsageError
from sinkprune.runtime import loading
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.chain import EncodedPicture
from sinkprune.runtime.steps.pictures import pixels_of
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.answer_tokens import Sampler
from support.references.steps import Watched

QUESTION = "What is on the table?"
Pipelines = Callable[..., Pipeline]


@pytest.fixture
def pipe(pipeline: Pipelines) -> Pipeline:
    return pipeline("gqa-112")


def new_stream(pipe: Pipeline, photo: Image.Image, tokens: int = 6, observer: Observer | None = None) -> Stream:
    """A stream of exactly so many tokens, unless it is cancelled."""
    options: Any = {"budget": "retain-64", "max_new_tokens": tokens, "min_new_tokens": tokens}
    return pipe.stream(photo, QUESTION, observer=observer or Observer(), **options)


def test_the_answer_is_there_after_the_last_piece(pipe: Pipeline, photo: Image.Image) -> None:
    stream, found = new_stream(pipe, photo), list[Answer]()
    with pytest.raises(UsageError, match=r"no answer yet\. Iterate to its end, or call rest"):
        stream.answer  # noqa: B018

    def passed_on() -> Generator[str, None, None]:
        found.append((yield from stream))

    pieces = list(passed_on())
    assert found == [stream.answer]
    assert "".join(pieces) == stream.answer.text
    assert (len(stream.answer.token_ids), stream.answer.finish) == (6, "length")
    # What is over stays over.
    assert next(stream, None) is None
    assert stream.answer.text == "".join(pieces)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_cancelled_stream_ends_after_the_current_token(pieces: int, pipe: Pipeline, photo: Image.Image) -> None:
    whole = new_stream(pipe, photo, 40)
    every, steps = list(whole), Watched()
    stream = new_stream(pipe, photo, 40, steps)
    heard = [next(stream) for _ in range(pieces)]
    before = len(steps.logits)
    stream.cancel()
    with pytest.raises(UsageError, match=r"It was cancelled: iterate to its end, or call rest\(\)"):
        _ = stream.answer
    heard += list(stream)
    answer = stream.answer
    assert answer.finish == "cancelled"
    # The token whose piece the reader has is the last; without any, the first is.
    assert len(answer.token_ids) == len(steps.logits) == max(before, 1)
    assert answer.token_ids == whole.answer.token_ids[: len(answer.token_ids)]
    assert "".join(heard) == answer.text
    assert heard[:pieces] == every[:pieces]
    assert answer.ms["latency"] is not None


def test_a_closed_stream_has_no_answer(pipe: Pipeline, photo: Image.Image) -> None:
    def throw(stream: Stream) -> None:
        with pytest.raises(KeyError, match="mine"):
            stream.throw(KeyError("mine"))

    for end in (Stream.close, throw):
        stream = new_stream(pipe, photo, 40)
        next(stream)
        end(stream)
        assert list(stream) == []
        with pytest.raises(UsageError, match="was closed"):
            stream.answer  # noqa: B018


@pytest.fixture
def without_collector() -> Iterator[None]:
    """What is unreferenced is freed at once; what is in a circle stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_a_stream_that_nobody_holds_is_freed_at_once(pipe: Pipeline, photo: Image.Image) -> None:
    observer = Observer()
    stream, held = new_stream(pipe, photo, 40, observer), weakref.ref(observer)
    next(stream)
    del stream, observer
    assert held() is None


@pytest.mark.usefixtures("without_collector")
def test_pictures_and_the_tower_s_inputs_are_freed_before_the_prefill(
    pipe: Pipeline, photo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture of 24 megapixels takes 72 MB and more, which a long answer does not need."""
    held, alive = list[weakref.ref[Any]](), list[Any]()

    class Held(Observer):
        def seen(self, pictures: Sequence[TowerInput]) -> None:
            held.extend(weakref.ref(array) for one in pictures for array in one.inputs.values())

        def encoded(self, pictures: Sequence[EncodedPicture]) -> None:
            alive.extend(one() for one in held)

    def noted(*given: Any) -> Any:
        held.append(weakref.ref(picture := pixels_of(*given)))
        return picture

    monkeypatch.setattr(loading, "pixels_of", noted)
    pipe.generate(str(photo_file), QUESTION, budget="retain-64", max_new_tokens=1, observer=Held())
    assert len(alive) >= 2 and all(one is None for one in alive)


def test_a_stream_is_read_in_one_thread_at_a_time() -> None:
    def steps() -> Any:
        with pytest.raises(RuntimeError, match="another thread reads this stream"):
            next(stream)
        yield "a"

    stream = Stream(steps(), StreamState(), 0.0)
    assert next(stream) == "a"


STOP = 2
WORDS = [5, 60, 7, STOP, 9]
"""The tokens that the sampler gives, over and over."""


@pytest.mark.parametrize("least", [0, 3, 4, 8, 12])
def test_no_stop_token_is_generated_before_min_new_tokens_or_shown(
    least: int, pipe: Pipeline, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*pipe.bundle.manifest.tokens.stop] == [STOP]
    tokens = cycle(WORDS)
    allowed = lambda logits: next(token for token in tokens if np.isfinite(logits[token]))  # noqa: E731
    monkeypatch.setattr(Sampler, "_sampled", lambda _, logits: allowed(logits))
    # A greedy answer leaves its logits on the device.
    stream = pipe.stream(photo, QUESTION, temperature=1.0, min_new_tokens=least, max_new_tokens=12)
    text, ids = "".join(stream), stream.answer.token_ids
    assert STOP not in ids[:least] and len(ids) >= least and ids[:3] == WORDS[:3]
    assert ids == WORDS[:4] or least > 3
    assert stream.answer.finish == ("stop" if STOP in ids else "length")
    assert text == stream.answer.text == pipe.prompts.tokenizer.decode(ids, skip_special_tokens=True)
    assert "</s>" not in text
