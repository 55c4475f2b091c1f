"""A request longer than the context is refused with what would fit: a budget, or fewer and smaller pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import PromptError
from sinkprune.deadlines.policy import schedules_up_to
from sinkprune.runtime.steps.context_length import check_length, check_picture_count, runnable
from sinkprune.runtime.steps.request import new_request
from sinkprune.runtime.steps.too_long import too_long_error
from support.references.steps import QUESTION


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


def test_the_budgets_up_to_another_the_largest_first(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    small, request = pipeline("gqa-112"), new_request(photo, "What?", max_new_tokens=4)
    layouts, manifest = [*small.family.largest().values()], small.bundle.manifest
    for budget, count in (("none", 5), ("retain-64", 2)):
        expected = ["none", "retain-192", "retain-128", "retain-64", "retain-32"][-count:]
        schedules = schedules_up_to(manifest, "sinkpruner", budget, layouts)
        assert [planned.budget for planned in schedules] == expected
        found = runnable(manifest, None, request, schedules[::-1], 20, layouts)
        assert [planned.budget for planned in found] == expected[::-1]
