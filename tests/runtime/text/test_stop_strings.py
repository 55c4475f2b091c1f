"""Strings that end an answer: found across tokens, never shown, and nothing is held back for longer than needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.text.answer_tokens import StopStrings

Pipelines = Callable[..., Pipeline]
QUESTION = "What is on the table?"
LETTERS = st.text("ab\n", max_size=12)


def whole(text: str, strings: list[str]) -> str:
    """`text` up to a string in it, found by adding one character after the other."""
    for end in range(1, len(text) + 1):
        found = [one for one in strings if text[:end].endswith(one)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_pieces_change_nothing(pieces: list[str], strings: list[str]) -> None:
    stop = StopStrings(strings)
    shown = ""
    for number, piece in enumerate(pieces):
        shown += stop.add(piece)
        so_far = "".join(pieces[: number + 1])
        # Nothing is shown that may have to be taken back, and all else is.
        assert so_far.startswith(shown)
        if not stop.found:
            held = so_far[len(shown) :]
            assert not held or any(one.startswith(held) and one != held for one in strings)
    shown += stop.end()
    text = "".join(pieces)
    assert shown == whole(text, strings)
    assert stop.found == any(one in text for one in strings)


def options(**more: Any) -> dict[str, Any]:
    return {"budget": "retain-64", "max_new_tokens": 24, "temperature": 1.5, "seed": 1, **more}


@pytest.fixture
def pipe(pipeline: Pipelines) -> Pipeline:
    return pipeline("gqa-112")


def test_an_answer_ends_before_a_string_of_several_tokens(pipe: Pipeline, photo: Image.Image) -> None:
    pieces = list(pipe.stream(photo, QUESTION, **options()))
    assert len(pieces) >= 5
    # The end of one piece, a whole one, and the beginning of the next
    string = pieces[1][-1] + pieces[2] + pieces[3][:1]
    text = "".join(pieces)
    assert text.index(string) == len("".join(pieces[:2])) - 1
    stream = pipe.stream(photo, QUESTION, **options(stop=("never", string)))
    heard = list(stream)
    answer = stream.answer
    assert "".join(heard) == answer.text == text[: text.index(string)]
    assert answer.finish == "stop"
    assert all(heard)
    assert 4 <= len(answer.token_ids) < 24
    alone = pipe.generate(photo, QUESTION, **options(stop=string))
    assert (alone.text, alone.token_ids) == (answer.text, answer.token_ids)


def test_strings_are_ignored_before_min_new_tokens(pipe: Pipeline, photo: Image.Image) -> None:
    pieces = list(pipe.stream(photo, QUESTION, **options(min_new_tokens=24)))
    string = pieces[0].strip() or pieces[1]
    assert pipe.generate(photo, QUESTION, **options(stop=[string])).text in pieces[0]
    late = pipe.generate(photo, QUESTION, **options(stop=[string], min_new_tokens=24))
    assert late.text == "".join(pieces)
