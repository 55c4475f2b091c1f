"""Heat maps: their colours are those of the norms and the salience, at the tokens' places."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data

from sinkprune import Pipeline
from sinkprune.calibration.norms import TokenFeatures
from sinkprune.calibration.plots import draw_heatmaps
from support.models.tasks import PHOTOS, write_task
from support.programs.commands import assert_refused, run, without_notes, wrote
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]
# Matplotlib's viridis at its ends, three quarters of it on black
DARK, BRIGHT = 0.75 * np.array([68, 1, 84]), 0.75 * np.array([253, 231, 37])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two photos of one name in two folders."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("one", "two")):
        (folder / name).mkdir()
        Image.fromarray(data.coffee()).resize((200, 150)).rotate(90 * number).save(folder / name / "cup.png")
    return folder


def drawn(norms: list[float], salience: list[float]) -> np.ndarray:
    """Heat maps of a black picture with four quarters, as pixels [height,width,3]."""
    boxes = np.array([[0, 0, 50, 50], [50, 0, 100, 50], [0, 50, 50, 100], [50, 50, 100, 100]], float)
    values = (np.array([each], np.float32) for each in (norms, salience))
    features = TokenFeatures(Image.new("RGB", (100, 100)), boxes, (range(4),), *values)
    return np.asarray(Image.open(io.BytesIO(draw_heatmaps(features, "black"))).convert("RGB"), float)


def colour_at(pixels: np.ndarray, panel: int, right: bool, low: bool) -> np.ndarray:
    """The colour in the middle of a quarter of a panel: the black one, then the two that are shaded."""
    inside = np.flatnonzero((pixels[pixels.shape[0] // 2 + 8] < 200).any(axis=1))
    starts = [inside[0], *inside[np.flatnonzero(np.diff(inside) > 8) + 1]]
    # Each map is followed by its scale.
    left = starts[[0, 1, 3][panel]]
    width = np.flatnonzero(np.diff(inside[inside >= starts[0]]) > 8)[0]
    rows = np.flatnonzero((pixels[:, starts[0] + 5] < 100).all(axis=1))
    x = left + int(width * (0.75 if right else 0.25))
    y = rows[0] + int(len(rows) * (0.75 if low else 0.25))
    found: np.ndarray = pixels[y, x]
    return found


def test_the_largest_norm_is_brightest_at_its_place() -> None:
    pixels = drawn([1, 1, 9, 1], [0.4, 0.0004, 0.0004, 0.0004])
    assert np.abs(colour_at(pixels, 0, False, True)).max() == 0
    for panel, bright in ((1, (False, True)), (2, (False, False))):
        for right in (False, True):
            for low in (False, True):
                expected = BRIGHT if (right, low) == bright else DARK
                assert np.abs(colour_at(pixels, panel, right, low) - expected).max() < 12
    # Equal values and zeros are drawn too.
    for salience in ([0.25] * 4, [1, 0, 0, 0]):
        assert drawn([1, 1, 1, 1], salience).shape[2] == 3


@pytest.mark.parametrize("name", ["qwen", slow("next")])
def test_pictures_of_one_name_have_maps_of_their_own(
    name: str, bundle: Bundles, photos: Path, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    lines = [{"image": str(photos / one / "cup.png"), "question": "What?", "answer": "a"} for one in ("one", "two")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = *("--data", tmp_path / "q.jsonl"), *("--json", tmp_path / "norms.json")
    outcome = run("sinkprune-calibrate", "norms", bundle(name), *given, "--heatmaps", maps)
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(tmp_path / "norms.json", maps))
    assert json.loads((tmp_path / "norms.json").read_text())["pictures"] == 2
    assert sorted(path.name for path in maps.iterdir()) == ["001-cup.png", "002-cup.png"]
    for path in maps.iterdir():
        with Image.open(path) as picture:
            assert picture.format == "PNG" and picture.width > 800
    # Drawn again, they take the place of the old ones.
    given = "--data", photos / "two", "--limit", 1, "--json", "-"
    outcome = run("sinkprune-calibrate", "norms", bundle(name), *given, "--heatmaps", maps)
    assert outcome.code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["pictures"] == 1


def test_what_cannot_be_drawn_is_refused_before_the_run(bundle: Bundles, photos: Path, tmp_path: Path) -> None:
    images, own, bad = photos / "one", bundle("gqa-112"), tmp_path / "bad.png"
    (tmp_path / "empty").mkdir()
    bad.write_text("no picture")
    for given, maps, said in (
        (tmp_path / "empty", tmp_path / "maps", "holds no picture"),
        (tmp_path, tmp_path / "maps", "bad.png"),
        (images, bad, "is no folder"),
        (images, tmp_path / "no" / "maps", "maps"),
        (images, own / "maps", "which is read"),
        # A heat map would be measured by the next command, or take the place of a picture.
        (images, images, "holds the pictures. Give --heatmaps another folder."),
    ):
        assert_refused(run("sinkprune-calibrate", "norms", own, "--data", given, "--heatmaps", maps), said)
    assert not (own / "maps").exists()


def test_each_picture_is_measured_once(bundle: Bundles, tmp_path: Path, pipeline: Callable[..., Pipeline]) -> None:
    report_file, plot_file = tmp_path / "norms.json", tmp_path / "norms.png"
    task = write_task(tmp_path, [(image, "What is this?") for image in ("a.png", "a.png", "b.png")])
    words = ("--data", task, "--json", report_file, "--plot", plot_file)
    outcome = run("sinkprune-calibrate", "norms", bundle("gqa-112"), *words)
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(plot_file, report_file))
    report = json.loads(report_file.read_text())
    assert (report["pictures"], report["tokens"]) == (2, 128)
    sample, unseen = report["warnings"]
    assert "2 pictures" in sample and "a part of the picture in 2 of 2 cases" in unseen
    for shown in (report["verdict"], sample, unseen):
        assert shown in outcome.stdout
    norms = np.concatenate([pipeline("gqa-112").encode(task.parent / name).norms for name in PHOTOS])
    assert report["largest"] == pytest.approx((norms / np.median(norms, axis=1, keepdims=True)).max())
    with Image.open(plot_file) as plot:
        assert plot.width > 500
