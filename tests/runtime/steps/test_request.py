"""Requests: which are rejected when they are made or laid out, with what would fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Clip, Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import BundleError, ImageError, PromptError, UsageError
from sinkprune.contract.schedule import schedule
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.steps.context_length import check_length, check_picture_count
from sinkprune.runtime.steps.decoding import prefill
from sinkprune.runtime.steps.request import new_request
from sinkprune.runtime.steps.too_long import too_long_error
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
        (1, " \n", r"the prompt is empty\. Ask something about the image"),
        (0, "What?", "the list of images is empty"),
        (1, b"What?", "expected a str"),
        (1, "W\udcff?", "not valid UTF-8"),
        (1, ["", "\u3000\u00a0"], "the prompt is empty"),
    ],
)
def test_texts_must_fit_the_pictures(pictures: int, texts: Any, said: str) -> None:
    with pytest.raises((PromptError, ImageError), match=said):
        new_request(["a.jpg"] * pictures, texts)


def test_pictures_belong_to_places_or_to_the_user_s_first_turn() -> None:
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
        with pytest.warns(UserWarning, match="^order changed nothing, because no picture is an array") as caught:
            new_request(without, "Why?", order="bgr")
        assert caught[0].filename == __file__


def test_a_schedule_of_other_rows_is_not_believed(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("gqa-112")
    pruned = watched(pipe, photo, budget="retain-64", max_new_tokens=1)
    planned = schedule(pipe.bundle.manifest, "sinkpruner", "none", [pruned.pictures[0].layout])
    with pytest.raises(BundleError, match="kept 15 visual tokens, the bundle says 64"):
        prefill(pipe.chain, planned, pruned.rows, Stopwatch(pipe.backend))


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (("user", ()), "a turn without texts"),
        (Turn("robot", ("a",)), "history has a Turn of 'robot', expected user, assistant or tool"),
        (("user", 5), "found int as the text of a turn"),
        (Turn("assistant", ("b",), CALL), "tool_calls of a Turn are .*, expected a tuple of ToolCall"),
        (Turn("assistant", ("b",), ({"id": "1"},)), "expected a tuple of ToolCall"),
        (Turn("user", ("b",), (CALL,)), "expected them of an assistant only"),
        (Turn("tool", ("b",), tool_call_id=5), "the id of a tool call is 5"),
    ],
)
def test_a_wrong_turn_is_refused_at_once(turn: Any, message: str) -> None:
    with pytest.raises((PromptError, UsageError), match=message):
        new_request("kitchen.jpg", "And now?", history=[turn])


@pytest.mark.parametrize(
    ("length", "kept", "said"),
    [
        ((100, 600, 400, 1024), {"a": 300, "b": 500, "c": 600}, "324 new tokens. Budget 'b' keeps 500"),
        ((100, 1000, 24, 1024), {"a": 300, "b": 500}, "positions. Shorten the prompt. Budget 'b' keeps 500"),
        ((20, 2000, 504, 1024), {"a": 600, "b": 800}, "'a' keeps fewest, 600 visual tokens, .* 500. Smaller!$"),
        ((300, 2000, 224, 1024), {"a": 600}, "600 visual tokens, .* 500. Smaller! Or shorten the prompt.$"),
        ((2000, 50, 4, 1024), {"a": 30}, "1024 positions. Shorten the prompt.$"),
        ((100, 1000, 24, 1024), {}, "1024 positions. Shorten the prompt.$"),
    ],
)
def test_what_would_fit_is_said(length: tuple[int, int, int, int], kept: dict[str, int], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        raise too_long_error(*length, kept, "Smaller!")


def test_errors_about_engines_keep_the_other_limits(bundle: Callable[..., Path]) -> None:
    limits, flags = Limits(30, 8, 1), "--max-prompt 30 --max-new-tokens 8 --max-images"
    one, two = (
        read_bundle(bundle("gqa-112", "fp32", ("retain-64",), **more)).manifest for more in ({}, {"max_images": 2})
    )

    build = f"build the engines again with {flags} 2 added to your sinkprune-build command"
    again = "export the checkpoint again with --max-images 2"
    for manifest, own, advice in ((two, limits, build), (one, limits, f"{again}, and {build}"), (one, None, again)):
        with pytest.raises(PromptError, match=f"^the prompt has 2 images, expected at most 1. For more, {advice}.$"):
            check_picture_count(manifest, own, 2)
    request = new_request(Image.new("RGB", (8, 6)), QUESTION, max_new_tokens=9)
    with pytest.raises(PromptError, match=rf"than the 8 .* with {flags.replace(' 8 ', ' 9 ')} 1 added"):
        check_length(two, limits, request, 30, 8, [])
