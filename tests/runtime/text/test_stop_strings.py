"""Strings that end an answer: found across tokens, never shown, and nothing is held back for longer than needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Pipeline, UsageError
from sinkprune.runtime.text.answer_text import StopStrings
from support.programs.commands import run

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


def test_the_longest_beginning_is_held_back() -> None:
    stop = StopStrings(["aab"])
    assert [stop.add("a"), stop.add("a"), stop.add("a"), stop.add("c")] == ["", "", "a", "aac"]
    assert (stop.add("xa"), stop.end(), stop.found) == ("x", "a", False)


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


def test_text_that_was_held_back_is_shown_in_the_end(pipe: Pipeline, photo: Image.Image) -> None:
    text = pipe.generate(photo, QUESTION, **options()).text
    stream = pipe.stream(photo, QUESTION, **options(stop=[text + "and more"]))
    assert list(stream) == [text]
    assert (stream.answer.text, stream.answer.finish) == (text, "length")
    pieces = list(pipe.stream(photo, QUESTION, **options()))
    # Held back after the second piece
    cancelled = pipe.stream(photo, QUESTION, **options(stop=["".join(pieces[1:6]) + "and more"]))
    assert next(cancelled) == pieces[0]
    cancelled.cancel()
    assert "".join(cancelled) == ""
    assert (cancelled.answer.text, cancelled.answer.finish) == (pieces[0], "cancelled")


def test_strings_are_ignored_before_min_new_tokens(pipe: Pipeline, photo: Image.Image) -> None:
    pieces = list(pipe.stream(photo, QUESTION, **options(min_new_tokens=24)))
    string = pieces[0].strip() or pieces[1]
    assert pipe.generate(photo, QUESTION, **options(stop=[string])).text in pieces[0]
    late = pipe.generate(photo, QUESTION, **options(stop=[string], min_new_tokens=24))
    assert late.text == "".join(pieces)


@pytest.mark.parametrize("stop", ["", [""], [None], 3, {"a"}, [b"a"]], ids=repr)
def test_what_is_no_string_is_refused(stop: Any, pipe: Pipeline, photo: Image.Image) -> None:
    with pytest.raises(UsageError, match=r"^stop is .*, expected strings that are not empty"):
        pipe.generate(photo, QUESTION, stop=stop)


def test_the_command_takes_strings(pipe: Pipeline, photo_file: Path) -> None:
    arguments = (pipe.bundle.path, "--image", photo_file, "--fit", "pad", "--prompt", QUESTION, "--json", "--seed", 1)
    arguments = (*arguments, "--temperature", 1.5, "--max-new-tokens", 12)
    text = json.loads(run("sinkprune-run", *arguments).stdout)["text"]
    string = text[len(text) // 2 :][:3]
    outcome = run("sinkprune-run", *arguments, "--stop", "never", "--stop", string)
    answer = json.loads(outcome.stdout)
    assert (answer["text"], answer["finish"], outcome.stderr) == (text[: text.index(string)], "stop", "")
    outcome = run("sinkprune-run", *arguments, "--stop", text[0])
    assert json.loads(outcome.stdout)["text"] == ""
    assert outcome.stderr == "note: the answer is empty: the model or a stop string ended it at once.\n"
