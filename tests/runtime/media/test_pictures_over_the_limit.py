"""Pictures with more pixels than a Qwen bundle takes, and clips with more frames: users learn what the model sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from sinkprune import Clip, FewerFramesWarning, PictureWarning, Pipeline, ScaledDownWarning
from sinkprune.contract.bundle import read_bundle
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.media.picture_warnings import fewer_frames, scaled_down, unseen_notes
from support.models.video_files import write_video
from support.programs.commands import run

Bundles = Callable[..., Path]
ADVICE = "the bundle's limit. For small things export it with a larger --max-pixels (docs/pictures.md)."


@pytest.fixture(scope="module")
def root(bundle: Bundles) -> Path:
    return bundle("qwen-tied")


@pytest.fixture(scope="module")
def family(root: Path) -> Family:
    return load_family(read_bundle(root).manifest, None)


@given(width=st.integers(1, 2000), height=st.integers(1, 2000))
@example(width=14, height=415)
def test_a_picture_is_reported_if_the_limit_shrinks_it(width: int, height: int, family: Family) -> None:
    if max(width, height) > 200 * min(width, height):
        return
    layout = family.layout(Image.new("L", (width, height)))
    assert layout.seen_size is not None
    seen_width, seen_height = layout.seen_size
    tower = family._tower  # type: ignore[attr-defined]
    side = tower.patch_size * tower.merge_size
    assert layout.tokens == seen_width * seen_height // side**2
    most = family._processor._settings["max_pixels"]  # type: ignore[attr-defined]
    if not round(width / side) or not round(height / side):
        # Narrower than half a token: transformers resizes such a picture by the least number of pixels.
        return
    limited = round(width / side) * round(height / side) * side**2 > most
    shrunk = seen_width * seen_height < 0.81 * width * height
    if scaled_down(layout):
        assert limited and shrunk
    elif limited and shrunk:
        # As small a change as that of rounding
        assert width - seen_width <= side / 2 and height - seen_height <= side / 2


def test_other_families_have_no_size_of_their_own(bundle: Bundles) -> None:
    layout = load_family(read_bundle(bundle("gqa-112")).manifest, None).layout(Image.new("L", (900, 900)))
    assert layout.seen_size is None and not unseen_notes(layout)


def test_commands_name_the_size_once_and_report_it(root: Path, photo: Image.Image, tmp_path: Path) -> None:
    large, small = tmp_path / "large.png", tmp_path / "small.png"
    photo.resize((1600, 1200)).save(large)
    photo.resize((56, 56)).save(small)
    photo.resize((1200, 1600)).save(tmp_path / "other.png")
    words = ("--prompt", "What?", "--max-new-tokens", 1)
    outcome = run("sinkprune-run", root, "--image", large, *words, "--json")
    report = json.loads(outcome.stdout)
    ((width, height),) = report["seen_size"]
    assert report["seen_frames"] == [1]
    assert width < 1600 and height < 1200 and abs(width / height - 4 / 3) < 0.3
    said = f"the model sees the 1600x1200 picture at {width}x{height} pixels, {ADVICE}"
    assert (outcome.code, outcome.stderr) == (0, f"{large}: {said}\n")
    outcome = run("sinkprune-run", root, "--image", small, *words, "--json")
    assert (outcome.code, outcome.stderr, json.loads(outcome.stdout)["seen_size"]) == (0, "", [[56, 56]])
    lines = [{"image": f"{name}.png", "question": "What?", "answer": "a"} for name in ("small", "large", "other")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = run("sinkprune-evaluate", root, "--data", tmp_path / "q.jsonl", "--budgets", "none")
    assert outcome.code == 0 and outcome.stderr.count("the model sees") == 1
    assert f"large.png: {said} 1 more picture is seen in part or smaller.\n" in outcome.stderr


def test_python_warns_once_for_each_size(root: Path, photo: Image.Image) -> None:
    pipeline = Pipeline.load(root)
    with pytest.warns(ScaledDownWarning) as caught:
        for size in ((1600, 1200), (1600, 1200), (56, 56), (1200, 1600)):
            pipeline.generate(photo.resize(size), "What?", max_new_tokens=1)
    sizes = [str(warning.message).split(" picture")[0] for warning in caught]
    assert sizes == ["the model sees the 1600x1200", "the model sees the 1200x1600"]


def test_long_and_large_clips_are_reported(bundle: Bundles, photo: Image.Image, tmp_path: Path) -> None:
    pictures = [photo.resize((1600, 1200)).rotate(turn) for turn in range(24)]
    root, video = bundle("qwen-tied", max_frames=4), write_video(tmp_path / "clip.mp4", pictures, fps=2)
    outcome = run("sinkprune-run", root, "--video", video, "--prompt", "What?", "--max-new-tokens", 1, "--json")
    assert outcome.code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    ((width, height),) = report["seen_size"]
    assert report["seen_frames"] == [4]
    size = (
        f"the model sees the 1600x1200 frames at {width}x{height} pixels, the bundle's limit. For small things "
        "export it with a larger --max-pixels or fewer --max-frames (docs/pictures.md)."
    )
    frames = (
        "the model sees 4 frames of the clip in place of 24, the bundle's limit. For short events export it with a "
        "larger --max-frames (docs/pictures.md)."
    )
    assert outcome.stderr == f"{video}: {size}\n{video}: {frames}\n"
    pipeline = Pipeline.load(root)
    # Of less than a frame by the model's rate.
    alone = pipeline.family.layout(pipeline.family.sample_frames(Clip(pictures[:1], fps=30)))
    assert scaled_down(alone) == size
    with pytest.warns(PictureWarning) as caught:
        for count in (24, 24, 4):
            answer = pipeline.generate(Clip(pictures[:count], fps=2), "What?", max_new_tokens=1)
            assert answer.images[0].layout.frames == 4
    assert [(warning.category, str(warning.message)) for warning in caught] == [
        (ScaledDownWarning, size),
        (FewerFramesWarning, frames),
    ]


@given(count=st.integers(1, 400), fps=st.floats(0.5, 60))
def test_a_clip_is_reported_if_the_limit_drops_a_tenth_of_its_frames(count: int, fps: float, clips: Family) -> None:
    taken = clips.sample_frames(Clip([Image.new("RGB", (56, 56))] * count, fps=fps))
    wanted = min(count, int(count / fps * 2))
    assert bool(fewer_frames(clips.layout(taken))) == (len(taken.frames) < 0.9 * wanted)


@pytest.fixture(scope="module")
def clips(bundle: Bundles) -> Family:
    return load_family(read_bundle(bundle("qwen-tied", max_frames=4)).manifest, None)
