"""Requests: which are rejected when they are made, and what observers receive."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Clip, Pipeline
from sinkprune.contract.errors import BundleError, ImageError, PromptError, UsageError
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.steps.decoding import prefill
from sinkprune.runtime.steps.request import new_request
from sinkprune.runtime.text.prompt import Turn
from sinkprune.runtime.text.tools import ToolCall
from support.references.steps import QUESTION, watched

CALL = ToolCall("1", "f", {"x": 1})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": True}, "max_new_tokens is True, expected a whole number from 1 to 10000000."),
        ({"max_new_tokens": 10**5000}, "max_new_tokens is a number of more than 80 digits, expected"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens is 9 and max_new_tokens 3, expected a minimum"),
        ({"deadline_ms": float("nan")}, "deadline_ms is nan, expected milliseconds"),
        ({"stop": [""]}, "stop is [''], expected strings that are not empty, as in '\\n'."),
        ({"temperature": float("nan")}, "temperature is nan, expected 0 (greedy) or a larger finite number."),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"seed": 2**128}, "seed is 340282366920938463463374607431768211456, expected a whole number from 0 to"),
        ({"budget": ["retain-64"]}, "budget is ['retain-64'], expected a name, as in 'retain-64'."),
        ({"method": None}, "method is None, expected a name, as in 'sinkpruner'."),
    ],
)
def test_what_no_bundle_can_answer_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        new_request("a.jpg", "Why?", **options)


@pytest.mark.parametrize(
    ("pictures", "texts", "said"),
    [
        (2, ["", "Why?"], "1 place for images, and there are 2 images"),
        (1, ["Two ", " and ", "."], "2 places for images, and there is 1 image"),
        (2, ["", " ", "\n"], "the prompt is empty"),
        (1, " \n", r"the prompt is empty\. Ask something about the image, as in 'What is this\?'\.$"),
    ],
)
def test_texts_must_fit_the_pictures(pictures: int, texts: str | list[str], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        new_request(["a.jpg"] * pictures, texts)


def test_pictures_belong_to_places_or_to_the_user_s_first_turn() -> None:
    with pytest.raises(ImageError, match="the list of images is empty"):
        new_request([], "What?")
    assert new_request((), "What?").pictures == ()
    greeted = new_request(["a.jpg", "b.jpg"], "And now?", history=[("assistant", "Hi."), ("user", "What is it?")])
    assert [turn.texts for turn in greeted.history] == [("Hi.",), ("", "", "What is it?")]
    first = new_request("a.jpg", "What is it?", history=[("assistant", "Hi.")])
    assert ([turn.texts for turn in first.history], first.texts) == ([("Hi.",)], ("", "What is it?"))


def test_an_order_of_channels_without_an_array_is_warned_of() -> None:
    array = np.zeros((4, 4, 3), np.uint8)
    picture = Image.fromarray(array)
    for pictures in (array, [picture, array], Clip([picture, array], 1.0)):
        new_request(pictures, "Why?", order="bgr")
    for without in (picture, ["a.jpg", picture], Clip([picture], 1.0)):
        with pytest.warns(UserWarning, match="^order changed nothing, because no picture is an array"):
            new_request(without, "Why?", order="bgr")


def test_observers_receive_every_step_in_order(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    told: list[str] = []

    class Names(Observer):
        def __getattribute__(self, name: str) -> Any:
            if name in ("seen", "encoded", "laid_out", "prefilled", "chose", "answered"):
                told.append(name)
            return super().__getattribute__(name)

    pipeline("gqa-112").generate(photo, QUESTION, observer=Names(), max_new_tokens=3, min_new_tokens=3)
    assert told == ["seen", "encoded", "laid_out", "prefilled", *["chose"] * 3, "answered"]


def test_a_schedule_of_other_rows_is_not_believed(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("gqa-112")
    pruned = watched(pipe, photo, budget="retain-64", max_new_tokens=1)
    planned = schedule(pipe.bundle.manifest, "sinkpruner", "none", [pruned.pictures[0].layout])
    with pytest.raises(BundleError, match="kept 15 visual tokens, the bundle says 64"):
        prefill(pipe.chain, planned, pruned.rows, Stopwatch(pipe.backend))


@pytest.mark.parametrize(
    ("history", "error", "message"),
    [
        ([("user", ())], PromptError, "a turn without texts"),
        ([Turn("robot", ("a",))], UsageError, "history has a Turn of 'robot', expected user, assistant or tool"),
        ([("user", 5)], PromptError, "found int as the text of a turn"),
        ([Turn("assistant", ("b",), CALL)], UsageError, "tool_calls of a Turn are .*, expected a tuple of ToolCall"),
        ([Turn("assistant", ("b",), ({"id": "1"},))], UsageError, "expected a tuple of ToolCall"),
        ([Turn("user", ("b",), (CALL,))], UsageError, "expected them of an assistant only"),
        ([Turn("tool", ("b",), tool_call_id=5)], UsageError, "the id of a tool call is 5"),
    ],
)
def test_a_wrong_turn_is_refused_at_once(history: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        new_request("kitchen.jpg", "And now?", history=history)
