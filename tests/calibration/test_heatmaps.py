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
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.tasks import PHOTOS, write_task
from support.programs.commands import assert_refused, run, without_notes, wrote
from support.programs.slow_cases import slow_except

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


def drawn(norms: list[float], salience: list[float], views: int = 1) -> np.ndarray:
    """Heat maps of a black picture with four quarters, as pixels [height,width,3]."""
    boxes = np.array([[0, 0, 50, 50], [50, 0, 100, 50], [0, 50, 50, 100], [50, 50, 100, 100]], float)
    features = TokenFeatures(
        Image.new("RGB", (100, 100)),
        np.tile(boxes, (views, 1)),
        tuple(range(4 * view, 4 * view + 4) for view in range(views)),
        np.tile(np.array(norms, np.float32), (views, 1)),
        np.tile(np.array(salience, np.float32), (views, 1)),
    )
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


def test_equal_values_and_zeros_are_drawn_too() -> None:
    assert drawn([1, 1, 1, 1], [0.25, 0.25, 0.25, 0.25]).shape[2] == 3
    assert drawn([1, 1, 1, 1], [1, 0, 0, 0]).shape[2] == 3


@pytest.mark.parametrize("name", slow_except({"qwen"}, ["gqa-112", "next", "qwen"]))
def test_pictures_of_one_name_have_maps_of_their_own(
    name: str, bundle: Bundles, photos: Path, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    lines = [{"image": str(photos / one / "cup.png"), "question": "What?", "answer": "a"} for one in ("one", "two")]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = *("--data", tmp_path / "q.jsonl"), *("--json", tmp_path / "norms.json")
    outcome = run("sinkprune-calibrate", "norms", bundle(name), *given, "--heatmaps", maps)
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(maps, tmp_path / "norms.json"))
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
    def refused(*words: object, said: str) -> None:
        assert_refused(run("sinkprune-calibrate", "norms", bundle("gqa-112"), *words), said)

    (tmp_path / "empty").mkdir()
    refused("--data", tmp_path / "empty", said="holds no picture")
    (tmp_path / "bad.png").write_text("no picture")
    refused("--data", tmp_path, said="bad.png")
    images = "--data", photos / "one"
    refused(*images, "--heatmaps", tmp_path / "bad.png", said="is no folder")
    refused(*images, "--heatmaps", tmp_path / "no" / "maps", said="maps")
    refused(*images, "--heatmaps", bundle("gqa-112") / "maps", said="which is read")
    # A heat map would be measured by the next command, or take the place of a picture.
    refused(*images, "--heatmaps", photos / "one", said="holds the pictures. Give --heatmaps another folder.")
    assert not (bundle("gqa-112") / "maps").exists()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Three questions about two photos."""
    return write_task(tmp_path, [(image, "What is this?") for image in ("a.png", "a.png", "b.png")])


def test_each_picture_is_measured_once(
    bundle: Bundles, task: Path, tmp_path: Path, pipeline: Callable[..., Pipeline]
) -> None:
    files = tmp_path / "norms.json", tmp_path / "norms.png"
    outcome = run(
        "sinkprune-calibrate", "norms", bundle("gqa-112"), "--data", task, "--json", files[0], "--plot", files[1]
    )
    assert (outcome.code, without_notes(outcome.stderr)) == (0, wrote(files[1], files[0]))
    report = json.loads(files[0].read_text())
    assert (report["pictures"], report["tokens"]) == (2, 128)
    assert report["verdict"] in outcome.stdout
    sample, unseen = report["warnings"]
    assert "2 pictures" in sample and "a part of the picture in 2 of 2 cases" in unseen
    assert sample in outcome.stdout and unseen in outcome.stdout
    norms = np.concatenate([pipeline("gqa-112").encode(task.parent / name).norms for name in PHOTOS])
    assert report["largest"] == pytest.approx((norms / np.median(norms, axis=1, keepdims=True)).max())
    with Image.open(files[1]) as plot:
        assert plot.width > 500


def test_a_suggested_rho_can_be_exported(checkpoint: Callable[[str], Path], task: Path, tmp_path: Path) -> None:
    # 3 of 64, where 1 % are 1
    export_bundle(ExportRequest(str(checkpoint("gqa-112")), ("retain-192+rho-46",)), tmp_path / "bundle")
    kept = Pipeline.load(tmp_path / "bundle").generate(
        task.parent / "a.png", "What is this?", budget="retain-192+rho-46", max_new_tokens=1
    )
    index, norms = kept.kept.index[0], kept.kept.norms[0]
    outliers = np.argsort(-norms)[:3]
    assert index[0] == outliers[0]
    assert not {*index[1:]} & {*outliers}
