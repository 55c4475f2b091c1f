"""The map of tokens in responses is the one that the overlay draws, for every family's shape of pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.serving.test_server import asked, served

from sinkprune import Pipeline
from sinkprune.runtime.overlay import draw_overlay, token_fates
from sinkprune.runtime.steps.decoding import Kept

Pipelines = Callable[..., Pipeline]
CASES = {"gqa-112": ("retain-64", 1, 1), "next": ("retain-320", 5, 2), "qwen-tied": ("prune-66.7", 1, 1)}
"""A budget, and the groups and views of the photo, by the name of the model."""


def from_server(pipe: Pipeline, picture: Image.Image, budget: str, stream: bool = False) -> dict[str, Any]:
    """Return the map of tokens in the response to a question about a picture."""
    options = {"max_tokens": 1, "kept_tokens": True, "stream": stream}
    body = {"model": "m", "budget": budget, "messages": asked(picture, "What?"), **options}
    with served(pipe, budget="none") as address:
        response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    text = response.text.split("data: ")[-2] if stream else response.text
    (found,) = json.loads(text)["sinkprune"]["kept_tokens"]
    return found  # type: ignore[no-any-return]


def check(found: dict[str, Any], kept: Kept) -> None:
    """Compare the map in a response with the fates and the layout of a picture of an answer."""
    fates, layout = token_fates(kept), kept.layout
    assert found["size"] == [*layout.size]
    np.testing.assert_allclose(found["boxes"], layout.boxes, atol=0.0051)
    assert found["views"] == [[view[0], view[-1] + 1] for view in layout.views]
    classes: dict[str, list[Any]] = {}
    for each in found["classes"]:
        classes.setdefault(each["name"], []).append(each)
        assert each["name"] in ("unseen", "padding") or f"{len(each['tokens'])} " in f"{each['text']} "
    masks = {"sink": fates.sink, "sanitizer": ~fates.sink & ~fates.kept, "last_layer": fates.survived}
    for name, mask in masks.items():
        assert [token for each in classes.get(name, ()) for token in each["tokens"]] == np.flatnonzero(mask).tolist()
    dropped = {each["layer"]: each["tokens"] for each in classes["stage"]}
    assert dropped == {layer: np.flatnonzero(mask).tolist() for layer, mask in fates.dropped_after.items()}
    assert [each["stage"] for each in classes["stage"]] == [*range(1, len(dropped) + 1)]
    # Each token has one class.
    tokens = [token for each in found["classes"] if each["name"] != "padding" for token in each["tokens"]]
    assert sorted(tokens) == [*range(layout.all_tokens)]


@pytest.mark.parametrize("name", CASES)
def test_a_response_has_the_fates_of_the_answer(name: str, pipeline: Pipelines, photo: Image.Image) -> None:
    budget, groups, views = CASES[name]
    pipe = pipeline(name, "fp32", (budget,))
    kept = pipe.generate(photo, "What?", budget=budget, max_new_tokens=1).kept
    assert (kept.layout.size, kept.layout.groups, len(kept.layout.views)) == ((600, 400), groups, views)
    for stream in (False, True):
        check(from_server(pipe, photo, budget, stream), kept)


def test_the_overlay_draws_the_colours_of_the_response(pipeline: Pipelines, photo: Image.Image) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",))
    white = Image.new("RGB", photo.size, "white")
    found = from_server(pipe, white, "retain-64")
    answer = pipe.generate(white, "What?", budget="retain-64", max_new_tokens=1)
    drawn, scale = draw_overlay([white], answer.method, answer.kept), 1100 / 600
    for each in found["classes"]:
        colour = np.frombuffer(bytes.fromhex(each["colour"][1:]), np.uint8)
        for token in each["tokens"]:
            left, top, right, bottom = (edge * scale for edge in found["boxes"][token])
            if each["fill"] is not None:
                centre = drawn.getpixel((int((left + right) / 2), int((top + bottom) / 2)))
                np.testing.assert_allclose(centre, 255 * (1 - each["fill"]) + each["fill"] * colour, atol=1)
            if each["outlined"]:
                assert drawn.getpixel((round(left) + 2, int((top + bottom) / 2))) == (*colour.tolist(),)


def test_unpruned_all_tokens_reach_the_last_layer(pipeline: Pipelines, photo: Image.Image) -> None:
    """Without the rows that end a line, which LLaVA-NeXT's prompt has too."""
    pipe = pipeline("next", "fp32", ("retain-320",))
    found = from_server(pipe, photo, "none")
    layout = pipe.family.layout(photo)
    (clear, *others) = found["classes"]
    assert clear["name"] == "last_layer" and [each["name"] for each in others] == ["padding"]
    assert clear["tokens"] == sorted({*layout.unpruned_rows.tolist()} - {-1})
