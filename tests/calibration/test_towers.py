"""Vision towers without an LLM: their norms and salience are transformers' own, and planted outliers are found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from sinkprune.calibration.norms import VisionTower
from support.models.tower_checkpoints import KINDS, PATCHES, PLANTED, SIZE, blocks, make_tower
from support.programs.commands import assert_refused, run, wrote
from support.programs.slow_cases import slow_except

Towers = Callable[[str], Path]


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Towers:
    """The folder of a small tower with planted outliers, by its model type."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_tower(made[kind], kind)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two photos and a text."""
    folder = tmp_path_factory.mktemp("photos")
    photo = Image.fromarray(data.coffee()).resize((90, 60))
    photo.save(folder / "b.png")
    photo.rotate(90, expand=True).save(folder / "a.JPG")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.mark.parametrize("kind", slow_except({"siglip_vision_model"}, KINDS))
def test_outliers_are_found_where_they_were_planted(kind: str, tower: Towers, photos: Path, tmp_path: Path) -> None:
    files = tmp_path / "norms.json", tmp_path / "norms.png"
    outcome = run(
        *("sinkprune-calibrate", "norms", tower(kind), "--data", photos, "--threads", 1),
        *("--json", files[0], "--plot", files[1], "--heatmaps", tmp_path / "maps"),
    )
    assert (outcome.code, outcome.stderr) == (0, wrote(tmp_path / "maps", *files[::-1]))
    report = json.loads(files[0].read_text())
    assert (report["model"], report["pictures"], report["tokens"]) == (tower(kind).name, 2, 2 * PATCHES)
    # 2 of 16 are more than 5 %: outliers, but no few that stand apart.
    assert report["outlier_share"] == pytest.approx(2 / 16)
    assert report["suggested_per_mille"] == 0
    assert report["suggestion"] in outcome.stdout
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["001-a.png", "002-b.png"]


@pytest.mark.parametrize("layer", [-2, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_salience_are_those_of_the_block(kind: str, layer: int, tower: Towers, tmp_path: Path) -> None:
    model = make_tower(tmp_path / "again", kind)
    image = Image.fromarray(data.coffee()).resize((120, 80))
    found = VisionTower(tower(kind), layer).features(image)
    block, given, attended = blocks(model)[layer], [], []
    attention = block.attention if kind.startswith("dinov2") else block.self_attn
    block.register_forward_hook(lambda module, inputs, output: given.append(output))
    attention.register_forward_hook(lambda module, inputs, output: attended.append(output[1]))
    # What the tower is shown is the picture that is drawn on.
    pixels = np.asarray(found.picture, np.float32).transpose(2, 0, 1) / 255
    settings = json.loads((tower(kind) / "preprocessor_config.json").read_text())
    mean, deviation = (np.reshape(settings[f"image_{name}"], (3, 1, 1)) for name in ("mean", "std"))
    with torch.no_grad():
        model(torch.from_numpy((pixels - mean) / deviation).float()[None])
    tokens = given[0] if isinstance(given[0], torch.Tensor) else given[0][0]
    in_front = tokens.shape[1] - PATCHES
    norms = [sum(float(x) ** 2 for x in token) ** 0.5 for token in tokens[0, in_front:]]
    np.testing.assert_allclose(found.norms[0], norms, rtol=1e-3)
    assert sorted(np.argsort(-found.norms[0])[:2]) == sorted(PLANTED)
    heads = attended[0][0].numpy()
    asking = range(heads.shape[1]) if kind.startswith("siglip") else [0]
    salience = [np.mean([heads[h, i, in_front + j] for h in range(4) for i in asking]) for j in range(PATCHES)]
    np.testing.assert_allclose(found.salience[0], salience, rtol=1e-3)
    assert found.picture.size == (SIZE, SIZE)
    assert found.boxes[5].tolist() == [14, 14, 28, 28]
    assert found.views == (range(16),)


def test_what_is_no_tower_is_refused(tower: Towers, photos: Path, tmp_path: Path) -> None:
    def refused(*said: str) -> None:
        outcome = run("sinkprune-calibrate", "norms", tmp_path, "--data", photos)
        assert_refused(outcome, *said)

    refused("bundle.json")
    config = tmp_path / "config.json"
    config.write_text("{")
    refused("config.json' is not JSON")
    config.write_text("[1]")
    refused("model_type None")
    config.write_text('{"model_type": "llama"}')
    refused("model_type 'llama', expected a vision tower's: clip,")
    config.write_text('{"model_type": "llava"}')
    refused("Export it first: sinkprune-export")
    config.write_bytes((tower("dinov2") / "config.json").read_bytes())
    refused("cannot be loaded")
    (tmp_path / "model.safetensors").write_bytes((tower("siglip_vision_model") / "model.safetensors").read_bytes())
    (tmp_path / "preprocessor_config.json").write_bytes((tower("dinov2") / "preprocessor_config.json").read_bytes())
    refused("weights of the tower are missing")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    refused("cannot be loaded")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_with_its_extra(package: str, tower: Towers, photos: Path) -> None:
    program = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from sinkprune.entry_points import calibrate; sys.argv[:] = ['', *sys.argv[2:]]; sys.exit(calibrate())"
    )
    words = [sys.executable, "-c", program, package, "norms", str(tower("dinov2")), "--data", str(photos)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    stderr = done.stderr
    assert stderr.startswith(f"error: measuring a tower without an LLM needs the package '{package}'")
    assert "pip install 'sinkprune[towers]'" in done.stderr
