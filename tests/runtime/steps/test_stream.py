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
from tokenizers import Tokenizer, models

from sinkprune import Pipeline, Stream, UsageError
from sinkprune.runtime import loading
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.chain import EncodedPicture
from sinkprune.runtime.steps.pictures import pixels_of
from sinkprune.runtime.stream import StreamState
from sinkprune.runtime.text.answer_tokens import Sampler
from support.models.checkpoints import IMAGE_TOKEN, as_llama, with_specials

QUESTION = "What is on the table?"
Pipelines = Callable[..., Pipeline]


@pytest.fixture
def pipe(pipeline: Pipelines) -> Pipeline:
    return pipeline("gqa-112")


def new_stream(pipe: Pipeline, photo: Image.Image, tokens: int = 6, observer: Observer | None = None) -> Stream:
    """A stream of exactly so many tokens, unless it is cancelled."""
    return pipe.stream(
        photo,
        QUESTION,
        budget="retain-64",
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        observer=observer or Observer(),
    )


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
    every = list(whole)
    chosen: list[int] = []

    class Counter(Observer):
        def chose(self, token: int, logits: object) -> None:
            chosen.append(token)

    stream = new_stream(pipe, photo, 40, Counter())
    heard = [next(stream) for _ in range(pieces)]
    before = len(chosen)
    stream.cancel()
    with pytest.raises(UsageError, match=r"It was cancelled: iterate to its end, or call rest\(\)"):
        _ = stream.answer
    heard += list(stream)
    answer = stream.answer
    assert answer.finish == "cancelled"
    # The token whose piece the reader has is the last; without any, the first is.
    assert len(answer.token_ids) == len(chosen) == max(before, 1)
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
def test_a_decoded_picture_is_freed_with_the_first_piece(
    pipe: Pipeline, photo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture of 24 megapixels takes 72 MB, which a long answer does not need."""
    held = list[weakref.ref[Any]]()

    def noted(*given: Any) -> Any:
        picture = pixels_of(*given)
        held.append(weakref.ref(picture))
        return picture

    monkeypatch.setattr(loading, "pixels_of", noted)
    stream = pipe.stream(str(photo_file), QUESTION, budget="retain-64", max_new_tokens=3, min_new_tokens=3)
    stream.step()
    assert [one() for one in held] == [None]


@pytest.mark.usefixtures("without_collector")
def test_the_tower_s_inputs_are_freed_before_the_prefill(pipe: Pipeline, photo: Image.Image) -> None:
    """Those of large pictures take hundreds of MB."""
    inputs, alive = list[weakref.ref[Any]](), list[Any]()

    class Held(Observer):
        def seen(self, pictures: Sequence[TowerInput]) -> None:
            inputs.extend(weakref.ref(array) for one in pictures for array in one.inputs.values())

        def encoded(self, pictures: Sequence[EncodedPicture]) -> None:
            alive.extend(one() for one in inputs)

    pipe.generate(photo, QUESTION, budget="retain-64", max_new_tokens=1, observer=Held())
    assert alive and all(array is None for array in alive)


def test_a_stream_is_read_in_one_thread_at_a_time() -> None:
    def steps() -> Any:
        with pytest.raises(RuntimeError, match="another thread reads this stream"):
            next(stream)
        yield "a"

    stream = Stream(steps(), StreamState(), 0.0)
    assert next(stream) == "a"


STOP = 2
FIRST_BYTE = 3
FIRST_WORD = FIRST_BYTE + 256 + 1


def in_bytes(text: str) -> list[int]:
    """The byte-fallback tokens of `text`."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def word(number: int) -> int:
    """A token that reads as a space and ``w<number>``."""
    return FIRST_WORD + number


SCRIPTS = {
    "whole": [*in_bytes("é日🙂"), word(0), STOP, word(1), word(2), word(3)],
    "half then stop": [word(0), in_bytes("é")[0], STOP, word(1)],
    "half then word": [word(0), *in_bytes("🙂")[:2], word(1), word(2), STOP, word(3)],
    "words": [word(0), word(1), word(2), STOP, word(3)],
}
"""The tokens that the sampler gives, over and over."""
Say = Callable[..., tuple[list[str], Any]]


def byte_fallback_tokenizer() -> Tokenizer:
    """Bytes and words, as in Llama's vocabulary: bytes are no special tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": STOP}
    vocabulary |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    vocabulary["▁"] = len(vocabulary)
    while len(vocabulary) < IMAGE_TOKEN:
        vocabulary[f"▁w{len(vocabulary) - FIRST_WORD}"] = len(vocabulary)
    vocabulary |= {"<image>": IMAGE_TOKEN, "<pad>": IMAGE_TOKEN + 1}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    return with_specials(as_llama(backend), ("<unk>", "<s>", "</s>", "<image>", "<pad>")).backend_tokenizer


@pytest.fixture
def say(pipe: Pipeline, photo: Image.Image, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Returns the pieces and the answer of a pipeline whose sampler gives a script."""
    assert [*pipe.bundle.manifest.tokens.stop] == [STOP]
    monkeypatch.setattr(pipe.prompts, "tokenizer", byte_fallback_tokenizer())

    def said(name: str, **options: Any) -> tuple[list[str], Any]:
        tokens = cycle(SCRIPTS[name])
        allowed = lambda logits: next(token for token in tokens if np.isfinite(logits[token]))  # noqa: E731
        monkeypatch.setattr(Sampler, "_sampled", lambda _, logits: allowed(logits))
        # A greedy answer leaves its logits on the device.
        stream, pieces = pipe.stream(photo, "What is this?", temperature=1.0, **options), list[str]()
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration as end:
                return pieces, end.value

    return said


@pytest.mark.parametrize(
    ("name", "options", "expected", "finish", "tokens"),
    [
        ("whole", {}, ["é", "日", "🙂", " w0"], "stop", 11),
        ("words", {}, ["w0", " w1", " w2"], "stop", 4),
        ("words", {"max_new_tokens": 4}, ["w0", " w1", " w2"], "stop", 4),
        ("words", {"max_new_tokens": 3}, ["w0", " w1", " w2"], "length", 3),
        # Half a character before the end is no text.
        ("half then stop", {}, ["w0"], "stop", 3),
        # Half a character that is never completed waits for the next word.
        ("half then word", {}, ["w0", "\ufffd w1", " w2"], "stop", 6),
    ],
)
def test_characters_come_whole_and_stop_tokens_are_not_shown(
    name: str, options: dict[str, object], expected: list[str], finish: str, tokens: int, say: Say
) -> None:
    pieces, answer = say(name, **options)
    assert (pieces, answer.text, answer.finish) == (expected, "".join(expected), finish)
    assert answer.token_ids == SCRIPTS[name][:tokens]


def test_an_answer_has_whole_characters_wherever_it_is_cut(say: Say) -> None:
    ends = {"é": 2, "日": 5, "🙂": 9, " w0": 10}
    for length in range(1, 11):
        pieces, answer = say("whole", max_new_tokens=length)
        assert (answer.finish, answer.token_ids) == ("length", SCRIPTS["whole"][:length])
        assert answer.text == "".join(part for part, end in ends.items() if end <= length) == "".join(pieces)


@pytest.mark.parametrize("least", [0, 3, 4, 8, 12])
def test_no_stop_token_is_generated_before_min_new_tokens(least: int, say: Say) -> None:
    _, answer = say("words", min_new_tokens=least, max_new_tokens=12)
    ids = answer.token_ids
    assert STOP not in ids[:least] and len(ids) >= least and ids[:3] == SCRIPTS["words"][:3]
    if least <= 3:
        assert ids == SCRIPTS["words"][:4]
    assert answer.finish == ("stop" if STOP in ids else "length") and "</s>" not in answer.text
