"""Several images on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from support.programs.commands import assert_refused, run

BUDGETS = ("retain-64",)


@pytest.fixture
def files(photo: Image.Image, tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "before.png", tmp_path / "after.png"]
    photo.save(paths[0])
    photo.rotate(180).resize((200, 300)).save(paths[1])
    return paths


def test_images_stand_where_the_prompt_has_places(
    bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], files: list[Path], tmp_path: Path
) -> None:
    root, kept = bundle("gqa-112", "fp32", BUDGETS, max_images=3), tmp_path / "kept.png"
    pipe = pipeline("gqa-112", "fp32", BUDGETS, max_images=3)
    pieces = ["Before: ", " and after: ", ". What has changed?"]
    asked = ("--image", files[0], "--image", files[1], "--prompt", "{image}".join(pieces), "--budget", "retain-64")
    outcome = run("sinkprune-run", root, *asked, "--json", "--max-new-tokens", 8, "--overlay", kept)
    assert outcome.code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    expected = pipe.generate([*files], pieces, budget="retain-64", max_new_tokens=8)
    assert answer["token_ids"] == expected.token_ids
    assert answer["visual_tokens"] == 128
    assert answer["tokens_per_layer"] == [30, 30, 14, 14, 14, 14, 14, 14]
    with Image.open(kept) as drawn:
        # Both pictures at a long side of 1100, a legend below each
        assert drawn.height > 733 + 1100
    in_front = run("sinkprune-run", root, *asked[:4], "--prompt", pieces[2], "--json", "--max-new-tokens", 8)
    assert json.loads(in_front.stdout)["prompt_tokens"] < answer["prompt_tokens"]
    # LLaVA's template has one place for images.
    assert "moved no image" in str(answer["notes"]) and "moved no image" not in str(
        json.loads(in_front.stdout)["notes"]
    )


def test_the_profile_measures_all_images_together(
    bundle: Callable[..., Path], files: list[Path], tmp_path: Path
) -> None:
    root, report = bundle("gqa-112", "fp32", BUDGETS, max_images=3), tmp_path / "report.json"
    images = ("--image", files[0], "--image", files[1])
    options = ("--prompt", "What?", "--repeat", 1, "--warmup-rounds", 0, "--new-tokens", 2, "--json", report)
    assert run("sinkprune-profile", root, *images, *options).code == 0
    one = json.loads(report.read_text())["budgets"]["none"]["flops"]
    assert run("sinkprune-profile", root, *images[:2], *options).code == 0
    half = json.loads(report.read_text())["budgets"]["none"]["flops"]
    assert one["ttft"] - one["prefill"] == 2 * (half["ttft"] - half["prefill"])


@pytest.mark.parametrize("command", ["sinkprune-run", "sinkprune-profile"])
def test_images_and_places_that_do_not_match(command: str, bundle: Callable[..., Path], files: list[Path]) -> None:
    root = bundle("gqa-112", "fp32", BUDGETS, max_images=3)
    image = ("--image", files[0])
    assert_refused(
        run(command, root, *image, "--prompt", "{image} or {image}?"), "2 places for images, and there is 1 image."
    )
    assert_refused(
        run(command, root, *image, *image, "--prompt", "See {image}"), "1 place for images, and there are 2 images"
    )
    assert_refused(run(command, root, *image, "--prompt", " {image} "), "prompt is empty")
    assert_refused(
        run(command, root, *image * 4, "--prompt", "What?"), "4 images, expected at most 3", "--max-images"
    )
    missing = files[0].with_name("none.png")
    assert_refused(run(command, root, *image, "--image", missing, "--prompt", "What?"), "none.png")
