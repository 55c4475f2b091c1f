"""`--fit` on the command line, and the line about pictures that the model sees only in part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.models.clips import frames
from support.models.video_files import write_video
from support.programs.commands import assert_refused, run

Bundles = Callable[..., Path]
OPTIONS = ("--prompt", "What is this?", "--max-new-tokens", 2)
WIDE = (
    "the model sees 56 % of the picture (the middle 720x720 of 1280x720). --fit pad shows it all (docs/pictures.md)."
)
TALL = "the model sees 50 % of the picture (the middle 60x60 of 60x120). --fit pad shows it all (docs/pictures.md)."


@pytest.fixture
def files(photo: Image.Image, tmp_path: Path) -> dict[str, Path]:
    """A picture of each shape, by its name."""
    sizes = {"wide": (1280, 720), "wide too": (1280, 720), "tall": (60, 120), "square": (90, 90), "line": (2000, 2)}
    paths = {name: tmp_path / f"{name}.png" for name in sizes}
    for name, size in sizes.items():
        photo.resize(size).save(paths[name], compress_level=1)
    return paths


def images(files: dict[str, Path], *names: str) -> list[Any]:
    return [word for name in names for word in ("--image", files[name])]


def test_unseen_parts_are_reported_once_a_size(bundle: Bundles, files: dict[str, Path]) -> None:
    root = bundle("gqa-112", budgets=("retain-64",), max_images=4)
    outcome = run("sinkprune-run", root, *images(files, "square", "wide", "tall", "wide too"), *OPTIONS, "--json")
    assert outcome.stderr == f"{files['wide']}: {WIDE}\n{files['tall']}: {TALL}\n"
    assert json.loads(outcome.stdout)["seen_share"] == [1, pytest.approx(112 / 199), 0.5, pytest.approx(112 / 199)]


@pytest.mark.parametrize("fit", ["pad", "stretch"])
def test_nothing_is_reported_where_the_model_sees_all(fit: str, bundle: Bundles, files: dict[str, Path]) -> None:
    for name in ("wide", "square"):
        outcome = run("sinkprune-run", bundle("gqa-112"), *images(files, name), *OPTIONS, "--json", "--fit", fit)
        assert (outcome.code, outcome.stderr) == (0, "")
        assert json.loads(outcome.stdout)["seen_share"] == [1]


def test_crop_is_what_this_checkpoint_does_by_itself(bundle: Bundles, files: dict[str, Path]) -> None:
    arguments = (bundle("gqa-112"), *images(files, "wide"), *OPTIONS, "--json")
    outcomes = [run("sinkprune-run", *arguments, *fit) for fit in ((), ("--fit", "crop"))]
    assert [outcome.stderr for outcome in outcomes] == [f"{files['wide']}: {WIDE}\n"] * 2
    answers = [json.loads(outcome.stdout) for outcome in outcomes]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


def test_a_thin_line_is_seen_by_less_than_a_percent(bundle: Bundles, files: dict[str, Path]) -> None:
    outcome = run("sinkprune-run", bundle("gqa-112"), *images(files, "line"), *OPTIONS)
    assert "the model sees less than 1 % of the picture (the middle 2x2 of 2000x2)" in outcome.stderr


def test_profile_reports_every_size_of_frames(bundle: Bundles, files: dict[str, Path]) -> None:
    once = ("--budgets", "retain-64", "--prompt", "What?", "--new-tokens", 1, "--warmup-rounds", 0)
    outcome = run("sinkprune-profile", bundle("gqa-112"), *images(files, "wide"), *once, "--repeat", 1)
    assert (outcome.code, outcome.stderr) == (0, f"{files['wide']}: {WIDE}\n")
    frames_of = ("--frames", files["wide"].parent, "--rate", 20, "--duration", 1)
    files["line"].unlink()
    outcome = run("sinkprune-profile", bundle("gqa-112"), *frames_of, *once)
    assert outcome.stderr == f"{files['tall']}: {TALL}\n{files['wide']}: {WIDE}\n"
    outcome = run("sinkprune-profile", bundle("gqa-112"), *frames_of, *once, "--fit", "pad")
    assert (outcome.code, outcome.stderr) == (0, "")


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_families_that_see_the_whole_picture_refuse_the_option(
    fit: str, bundle: Bundles, files: dict[str, Path], photo: Image.Image, tmp_path: Path
) -> None:
    message = f"fit is '{fit}', but models of family '%s' see the whole picture already. Leave out fit (--fit)."
    wide = images(files, "wide")
    assert_refused(run("sinkprune-run", bundle("next"), *wide, *OPTIONS, "--fit", fit), message % "llava-next")
    qwen = bundle("qwen", max_frames=4)
    assert_refused(run("sinkprune-profile", qwen, *wide, "--prompt", "?", "--fit", fit), message % "qwen2.5-vl")
    write_video(tmp_path / "clip.mp4", frames(8, (160, 112), photo))
    clip = ("--video", tmp_path / "clip.mp4")
    assert_refused(run("sinkprune-run", qwen, *clip, *OPTIONS, "--fit", fit), message % "qwen2.5-vl")


def test_whole_pictures_and_clips_have_a_share_of_one(
    bundle: Bundles, files: dict[str, Path], photo: Image.Image, tmp_path: Path
) -> None:
    write_video(tmp_path / "clip.mp4", frames(8, (160, 112), photo))
    qwen = bundle("qwen", max_frames=4)
    scaled = f"{files['wide']}: the model sees the 1280x720 picture at 812x448 pixels, the bundle's limit. "
    for given, said in ((images(files, "wide"), scaled), (["--video", tmp_path / "clip.mp4"], "")):
        outcome = run("sinkprune-run", qwen, *given, *OPTIONS, "--json")
        assert outcome.code == 0 and outcome.stderr.startswith(said) and outcome.stderr.count("\n") == bool(said)
        assert json.loads(outcome.stdout)["seen_share"] == [1]
    outcome = run("sinkprune-run", bundle("next"), *images(files, "wide"), *OPTIONS, "--json")
    assert (outcome.stderr, json.loads(outcome.stdout)["seen_share"]) == ("", [1])
