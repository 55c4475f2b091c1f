"""Preprocessing equals transformers' CLIP and LLaVA image processors, and token boxes lie where tokens look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import CLIPImageProcessorPil, LlavaImageProcessorPil

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import ImageError
from sinkprune.contract.manifest import Manifest
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families import FITS, Fit, load_family
from sinkprune.runtime.families.llava import SquareProcessor
from sinkprune.runtime.media.images import read_image
from support.references.steps import layout_of

SETTINGS = read_family("preset", PRESETS["llava-1.5-7b"]).processor({})
VARIANTS: dict[str, dict[str, Any]] = {
    "no crop": {"do_center_crop": False},
    "no crop, square size": {"do_center_crop": False, "size": {"height": 224, "width": 224}},
    "bilinear": {"resample": 2},
    "lanczos": {"resample": 1},
    "height and width": {"size": {"height": 336, "width": 448}},
    "crop larger than the image": {"size": {"shortest_edge": 215}},
    "crop larger in height only": {
        "size": {"height": 201, "width": 400},
        "crop_size": {"height": 336, "width": 224},
    },
    "crop of odd size": {"crop_size": {"height": 225, "width": 331}},
    "no resize": {"do_resize": False},
    "no rescale": {"do_rescale": False, "do_normalize": False},
    "other scale": {"rescale_factor": 1 / 127.5},
    "no normalize": {"do_normalize": False},
    "other mean and std": {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]},
}
COLOUR_KEYS: dict[str, Any] = {"P": 3, "L": 20, "RGB": (36, 3, 2)}
LARGE_SIZES = [(1500, 1000), (1000, 1500), (1200, 1200), (1344, 1008), (901, 1733)]
TOKENS = [(0, 0), (0, 23), (7, 12), (11, 5), (12, 12), (16, 18), (23, 0), (23, 23)]


def theirs(path: Path, settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What transformers computes for the file."""
    kind = LlavaImageProcessorPil if settings["do_pad"] else CLIPImageProcessorPil
    processor = kind(**(settings if settings["do_pad"] else {**settings, "do_pad": None}))
    with Image.open(path) as image:
        pixels: np.ndarray[Any, Any] = processor(ImageOps.exif_transpose(image), return_tensors="np")["pixel_values"][
            0
        ]
    return pixels


def assert_equal_to_transformers(path: Path, settings: dict[str, Any]) -> None:
    expected = theirs(path, settings)
    found = SquareProcessor(settings)(read_image(path))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize("do_pad", [False, True], ids=["clip", "llava padded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers_with_other_settings(variant: str, do_pad: bool, photo_file: Path) -> None:
    assert_equal_to_transformers(photo_file, {**SETTINGS, **VARIANTS[variant], "do_pad": do_pad})


def save_mode(photo: Image.Image, mode: str, folder: Path) -> Path:
    """The photo in a file of another pixel mode, `mode+key` with one of its colours transparent."""
    mode, key = mode.removesuffix("+key"), mode.endswith("+key")
    alpha = Image.linear_gradient("L").resize(photo.size)
    if mode == "CMYK":
        image, name = photo.convert("CMYK"), "print.jpg"
    elif mode in ("LA", "RGBA"):
        image, name = photo.convert(mode.removesuffix("A") or "RGB"), "transparent.png"
        image.putalpha(alpha)
    else:
        image, name = photo.convert(mode), "other.png"
    image.save(folder / name, **({"transparency": COLOUR_KEYS[mode]} if key else {}))
    with Image.open(folder / name) as saved:
        assert saved.mode == mode
    return folder / name


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "P+key", "L+key", "RGB+key"])
def test_equals_transformers_for_other_pixel_modes(mode: str, photo: Image.Image, tmp_path: Path) -> None:
    assert_equal_to_transformers(save_mode(photo.resize((317, 211)), mode, tmp_path), SETTINGS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_equals_transformers_for_photos_turned_by_exif(orientation: int, photo: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo.save(path, exif=exif, quality=95)
    assert read_image(path).size == (photo.size if orientation < 5 else photo.size[::-1])
    assert_equal_to_transformers(path, SETTINGS)
    upright = SquareProcessor(SETTINGS)(photo)
    turned = SquareProcessor(SETTINGS)(read_image(path))
    assert (np.abs(turned - upright).mean() < 0.05) == (orientation == 1)


def test_a_panorama_is_refused_with_its_size_and_the_ratio_that_works() -> None:
    with pytest.raises(ImageError) as caught:
        SquareProcessor(SETTINGS)(Image.new("RGB", (30000, 10)))
    message = str(caught.value)
    assert "30000x10" in message
    assert str(336 * 3000) in message
    ratio = int(message.split(" below ")[1].split(":1")[0])
    assert SquareProcessor(SETTINGS).source_box((ratio, 1))[1::2] == (0, 1)


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    """The manifest of a bundle with 24x24 visual tokens."""
    return read_bundle(bundle("mha-336")).manifest


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("size", LARGE_SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_bright_square_in_a_tokens_box_brightens_that_patch_alone(
    size: tuple[int, int], fit: Fit, manifest: Manifest
) -> None:
    fitted = load_family(manifest, fit)
    boxes = layout_of(fitted, size).boxes
    assert boxes.shape == (576, 4)
    black = Image.new("RGB", size)

    def brightness(image: Image.Image) -> np.ndarray[Any, Any]:
        """[24,24] how much brighter than of a black image each patch is that the tower sees; white is 1."""
        change = fitted.inputs(image)["pixel_values"][0] - fitted.inputs(black)["pixel_values"][0]
        grey = (change * np.array(manifest.processor["image_std"])[:, None, None]).mean(axis=0)
        patches: np.ndarray[Any, Any] = grey.reshape(24, 14, 24, 14).mean(axis=(1, 3))
        return patches

    seen = 0
    for row, column in TOKENS:
        left, top, right, bottom = (round(edge) for edge in boxes[row * 24 + column])
        if left < 0 or top < 0 or right > size[0] or bottom > size[1]:
            assert fit == "pad", "only padding lies outside the image"
            continue
        image = black.copy()
        image.paste((255, 255, 255), (left, top, right, bottom))
        patches = brightness(image)
        assert patches[row, column] > 0.9
        patches[row, column] = 0
        assert patches.max() < 0.07
        seen += 1
    assert seen >= 2
