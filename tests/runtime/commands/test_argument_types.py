"""Odd values for each argument of the Python functions: the call works, or fails at once with the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import (
    Camera,
    Clip,
    Pipeline,
    Policy,
    Request,
    Tools,
    Turn,
    VideoFile,
    overlay,
    read_action_costs,
    read_costs,
    write_costs,
)
from sinkprune.contract.errors import OptionError, SinkpruneError
from support.programs.slow_cases import every


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
    "-1": lambda: -1,
    "a huge int": lambda: 10**5000,
    "1.5": lambda: 1.5,
    "NaN": lambda: float("nan"),
    "a word": lambda: "word",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"word",
    "an empty list": list,
    "a list of None": lambda: [None],
    "a dict": lambda: {"image": 1},
    "an object": object,
    "a function": lambda: len,
    "a closed file": closed_file,
    "a closed image": closed_image,
    "an image": lambda: Image.new("RGB", (8, 8)),
    "an array of objects": lambda: np.array([None, {}], dtype=object),
    "a clip": lambda: Clip([Image.new("RGB", (8, 8))], 1.0),
}
OPTIONS = (
    *("budget", "method", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "seed", "stop", "system"),
    *("schema", "regex", "choice"),
)


def outcome(call: Callable[[], Any], *names: str) -> None:
    """Check that the call works, or raises an error for users with one line of a reasonable length."""
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


@pytest.mark.filterwarnings("ignore:.* changed nothing, because this answer is greedy")
@pytest.mark.parametrize("value", ODD)
def test_options_pictures_prompts_and_clips(value: str, pipeline: Callable[..., Pipeline]) -> None:
    pipe, picture, odd = pipeline("qwen", max_frames=4), Image.new("RGB", (8, 8)), ODD[value]()
    for name in OPTIONS:
        outcome(partial(Request, (picture,), ("", "What?"), **{name: odd}), name)
        outcome(partial(pipe.generate, picture, "What?", **{"max_new_tokens": 1, name: odd}), name)
    outcome(lambda: pipe.generate(odd, "What?", max_new_tokens=1), "image")
    outcome(lambda: pipe.generate([picture, odd], "What?", max_new_tokens=1), "image")
    outcome(lambda: pipe.encode(odd), "image")
    outcome(lambda: pipe.generate(picture, odd, max_new_tokens=1), "prompt")
    outcome(lambda: pipe.generate(picture, ["", odd], max_new_tokens=1), "prompt")
    outcome(lambda: Request(odd, ("", "What?")), "pictures")
    outcome(lambda: Request((picture,), odd), "texts")
    outcome(lambda: Clip([picture], odd), "fps")
    if value != "a closed file":
        # A closed file raises its own error when it is iterated.
        outcome(lambda: Clip(odd, 1.0), "frames")
    outcome(lambda: pipe.generate(Clip([picture, picture, odd], 1.0), "What?", max_new_tokens=1))
    outcome(lambda: VideoFile(odd), "path")


OF_LOADING = ("bundle", "backend", "threads", "engines", "compute", "check_sums", "sha256", "signed_by", "fit")


@pytest.mark.parametrize(("name", "value"), every(6, product((*OF_LOADING, "wrap", "during"), ODD)))
def test_what_a_pipeline_is_loaded_with(name: str, value: str, bundle: Callable[..., Path]) -> None:
    options = {"bundle": bundle("gqa-112"), name: ODD[value]()}
    if name in OF_LOADING or not callable(options[name]):
        # Any function is a valid value of hooks.
        outcome(lambda: Pipeline.load(options.pop("bundle"), **options), name)


def test_whole_numbers_of_numpy_become_ints_which_do_not_overflow() -> None:
    most: Any = np.uint8(100)
    request = Request(("a.jpg",), ("", "What?"), max_new_tokens=most, min_new_tokens=most, seed=most)
    assert type(request.max_new_tokens) is type(request.min_new_tokens) is int
    assert request.max_new_tokens + request.min_new_tokens + 100 == 300
    assert request.new_sampler()(np.eye(4, dtype=np.float32)[2]) == 2


def test_options_of_another_call_are_refused_with_their_place(
    bundle: Callable[..., Path], pipeline: Callable[..., Pipeline]
) -> None:
    load: Any = Pipeline.load
    generate: Any = pipeline("gqa-112").generate
    picture = Image.new("RGB", (8, 8))
    with pytest.raises(OptionError, match=r"^budget is an option of Pipeline.generate. Give it there.$"):
        load(bundle("gqa-112"), budget="none")
    with pytest.raises(OptionError, match=r"^fit is an option of Pipeline.load, not of a request. Give it there.$"):
        generate(picture, "What?", fit="pad")


@pytest.mark.parametrize(
    ("call", "option"),
    [
        *((call, "path") for call in (VideoFile, read_costs, write_costs, read_action_costs)),
        *((call, "threads") for call in (Pipeline.load, Policy.load)),
        *((Policy.warm_up, option) for option in ("progress", "seconds")),
        (Policy.act, "steps"),
        (Camera, "order"),
        (Clip, "frames"),
        (Request, "budget"),
        (overlay, "picture"),
        (Tools, "parallel"),
        (Turn, "tool_calls"),
    ],
)
def test_each_public_call_names_its_options(call: Any, option: str) -> None:
    given, shown = option[:-1], signature(call).parameters
    said = rf"^there is no option '{given}'; did you mean '{option}'\? Options are: .*\b{option}\b"
    with pytest.raises(OptionError, match=said):
        call(**{given: 1})
    assert option in shown and all(one.kind is not one.VAR_KEYWORD for one in shown.values())
