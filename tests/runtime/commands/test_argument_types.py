"""What programs may give in place of each argument: it works, or is refused at the call, and its name is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Clip, Pipeline, VideoFile
from sinkprune.contract.errors import SinkpruneError
from sinkprune.runtime.steps.request import Request
from support.programs.slow_cases import slow_except


def closed_image() -> Image.Image:
    image = Image.new("RGB", (4, 4))
    image.close()
    return image


def closed_file() -> Any:
    file = Path(__file__).open("rb")  # noqa: SIM115
    file.close()
    return file


ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "7": lambda: 7,
    "a huge int": lambda: 10**5000,
    "1.5": lambda: 1.5,
    "NaN": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "np.int64": lambda: np.int64(3),
    "np.uint8": lambda: np.uint8(3),
    "np.float32": lambda: np.float32(0.5),
    "a word": lambda: "word",
    "no word": lambda: "",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"word",
    "a path": lambda: Path("/nowhere/x"),
    "bytes of a path": lambda: b"/nowhere/x",
    "an empty list": list,
    "a list of None": lambda: [None],
    "nested lists": lambda: [[Image.new("RGB", (4, 4))]],
    "a dict": lambda: {"image": 1},
    "a set": lambda: {1},
    "an object": object,
    "a class": lambda: Pipeline,
    "a function": lambda: len,
    "a closed file": closed_file,
    "a closed image": closed_image,
    "an image": lambda: Image.new("RGB", (8, 8)),
    "floats": lambda: np.zeros((8, 8, 3), np.float32),
    "an array of no pixels": lambda: np.zeros((0, 8, 3), np.uint8),
    "an array of two axes": lambda: np.zeros((8, 8), np.uint8),
    "an array of objects": lambda: np.array([None, {}], dtype=object),
    "a clip": lambda: Clip([Image.new("RGB", (8, 8))], 1.0),
}
OPTIONS = ("budget", "method", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "seed", "stop", "system")


def outcome(call: Callable[[], Any], *names: str) -> None:
    """The call works, or says in an error that users can mend what was wrong, on one line of some length."""
    try:
        call()
    except SinkpruneError as error:
        said = str(error)
    except TypeError as error:
        said = str(error)
        assert any(name in said for name in names), said
    else:
        return
    assert said
    assert len(said) < 700
    assert "\n" not in said


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_request(name: str, value: str, pipeline: Callable[..., Pipeline]) -> None:
    picture, odd = Image.new("RGB", (8, 8)), ODD[value]()
    outcome(lambda: Request((picture,), ("", "What?"), **{name: odd}), name)
    options = {"max_new_tokens": 1, name: odd}
    outcome(lambda: pipeline("gqa-112").stream(picture, "What?", **options), name)
    outcome(lambda: pipeline("gqa-112").generate(picture, "What?", **options), name)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", ["gqa-112", "qwen"])
def test_pictures_and_prompts(name: str, value: str, pipeline: Callable[..., Pipeline]) -> None:
    pipe, picture, odd = pipeline(name), Image.new("RGB", (8, 8)), ODD[value]()
    outcome(lambda: pipe.generate(odd, "What?", max_new_tokens=1), "image")
    outcome(lambda: pipe.generate([picture, odd], "What?", max_new_tokens=1), "image")
    outcome(lambda: pipe.encode(odd), "image")
    outcome(lambda: pipe.generate(picture, odd, max_new_tokens=1), "prompt")
    outcome(lambda: pipe.generate(picture, ["", odd], max_new_tokens=1), "prompt")
    outcome(lambda: Request(odd, ("", "What?")), "pictures")
    outcome(lambda: Request((picture,), odd), "texts")


@pytest.mark.parametrize("value", ODD)
def test_clips_and_video_files(value: str, pipeline: Callable[..., Pipeline]) -> None:
    frames, odd = [Image.new("RGB", (8, 8))] * 2, ODD[value]()
    outcome(lambda: Clip(frames, odd), "fps")
    if value != "a closed file":
        # Whatever an iterator raises is its own.
        outcome(lambda: Clip(odd, 1.0), "frames")
    outcome(lambda: pipeline("qwen", max_frames=4).generate(Clip([*frames, odd], 1.0), "What?", max_new_tokens=1))
    outcome(lambda: VideoFile(odd), "path")


LOADED = [
    (name, value)
    for name in (
        *("bundle", "backend", "threads", "engines", "compute", "check_sums", "sha256", "signed_by"),
        *("wrap", "fit", "during"),
    )
    for value in ODD
    # What a function does is its own.
    if not (callable(ODD[value]()) and name in ("wrap", "during"))
]


@pytest.mark.parametrize(("name", "value"), slow_except(LOADED[::6], LOADED))
def test_what_a_pipeline_is_loaded_with(name: str, value: str, bundle: Callable[..., Path]) -> None:
    odd = ODD[value]()
    options = {"bundle": bundle("gqa-112"), name: odd}
    outcome(lambda: Pipeline.load(options.pop("bundle"), **options), name)


@pytest.mark.parametrize("value", ODD)
def test_whoever_is_told(value: str, pipeline: Callable[..., Pipeline]) -> None:
    pipe, picture, odd = pipeline("gqa-112"), Image.new("RGB", (8, 8)), ODD[value]()
    outcome(lambda: pipe.generate(picture, "What?", max_new_tokens=1, observer=odd), "observer")
    if not callable(odd):
        outcome(lambda: pipe.generate(picture, "What?", max_new_tokens=1, on_text=odd), "on_text")


@pytest.mark.parametrize("value", [np.int64(2), np.uint8(2), np.int32(2)], ids=repr)
def test_whole_numbers_of_numpy_are_whole_numbers(value: Any, pipeline: Callable[..., Pipeline]) -> None:
    picture = Image.new("RGB", (8, 8))
    answers = [
        pipeline("gqa-112").generate(picture, "What?", max_new_tokens=count, min_new_tokens=count, seed=count)
        for count in (value, 2)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids) == 2


def test_a_small_type_of_numpy_does_not_overflow(pipeline: Callable[..., Pipeline]) -> None:
    request = Request(("a.jpg",), ("", "What?"), max_new_tokens=np.uint8(250))  # type: ignore[arg-type]
    assert type(request.max_new_tokens) is int
    assert request.max_new_tokens + 250 == 500


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_tokens": True}, "max new tokens is True, expected a whole number from 1 to 10000000."),
        ({"max_new_tokens": 10**30}, "max new tokens is 1000000000000000000000000000000, expected a whole number"),
        ({"max_new_tokens": 10**5000}, "max new tokens is a number of more than 80 digits, expected"),
        ({"temperature": float("nan")}, "temperature is nan, expected 0 (greedy) or a larger finite number."),
        ({"temperature": float("inf")}, "temperature is inf, expected 0"),
        ({"top_p": "0.5"}, "top-p is '0.5', expected more than 0 and at most 1."),
        ({"seed": 2**128}, "seed is 340282366920938463463374607431768211456, expected a whole number from 0 to"),
        ({"budget": ["retain-64"]}, "budget is ['retain-64'], expected a name, as in 'retain-64'."),
        ({"method": None}, "method is None, expected a name, as in 'sinkpruner'."),
    ],
)
def test_messages_say_what_was_found_and_expected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SinkpruneError, match=re.escape(said)):
        Request(("a.jpg",), ("", "What?"), **options)
