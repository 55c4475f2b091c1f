"""Streaming: pieces add up to the answer, characters come whole, stop tokens end it unseen."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models

from sinkprune import Pipeline
from sinkprune.runtime.text.answer_tokens import Sampler
from support.models.checkpoints import IMAGE_TOKEN, as_llama, with_specials

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
def say(pipeline: Callable[..., Pipeline], photo: Image.Image, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Returns the pieces and the answer of a pipeline whose sampler gives a script."""
    pipe = pipeline("gqa-112")
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
