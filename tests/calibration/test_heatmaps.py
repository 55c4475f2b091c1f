"""Heat maps: their colours are those of the norms and the salience, at the tokens' places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from skimage import data

from sinkprune import Pipeline
from sinkprune.calibration import plots
from sinkprune.calibration.norms import TokenFeatures
from sinkprune.calibration.plots import draw_heatmaps
from support.models.tasks import PHOTOS, write_task
from support.programs.commands import assert_refused, run, succeed, without_notes, wrote
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two photos of one name in two folders."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("one", "two")):
        (folder / name).mkdir()
        Image.fromarray(data.coffee()).resize((200, 150)).rotate(90 * number).save(folder / name / "cup.png")
    return folder


def test_the_largest_norm_is_brightest_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(norms: list[float], salience: list[float]) -> Any:
        values = (np.array([each], np.float32) for each in (norms, salience))
        return draw_heatmaps(TokenFeatures(Image.new("RGB", (100, 100)), boxes, (range(4),), *values), "black")

    boxes = np.array([[0, 0, 50, 50], [50, 0, 100, 50], [0, 50, 50, 100], [50, 50, 100, 100]], float)
    # Equal values and zeros are drawn too.
    for salience in ([0.25] * 4, [1, 0, 0, 0]):
        assert drawn([1, 1, 1, 1], salience).startswith(b"\x89PNG")
    monkeypatch.setattr(plots, "figure_bytes", lambda figure, form: figure)
    _, of_norms, of_salience, *_ = drawn([1, 1, 9, 1], [0.4, 0.0004, 0.0004, 0.0004]).axes
    for axes, shades in ((of_norms, [0, 0, 1, 0]), (of_salience, [1, 0, 0, 0])):
        maps, sinks = axes.collections
        np.testing.assert_allclose(maps.norm(maps.get_array()), shades, atol=1e-6)
        assert [[*path.get_extents().extents] for path in maps.get_paths()] == boxes.tolist()
        assert [[*path.get_extents().extents] for path in sinks.get_paths()] == [[0, 50, 50, 100]]
        # Rows of pixels are counted from the top.
        assert axes.get_ylim() == (100, 0)


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
    outcome = succeed("sinkprune-calibrate", "norms", bundle(name), *given, "--heatmaps", maps)
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
