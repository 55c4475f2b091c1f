"""Preprocessing equals that of transformers, token boxes lie where tokens look, and some pictures are rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers import CLIPImageProcessorPil, LlavaImageProcessorPil

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError, ImageError
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families import FITS, Fit, load_family
from sinkprune.runtime.families.llava import SquareProcessor
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.steps.pictures import decoded

SETTINGS = read_family("preset", PRESETS["llava-1.5-7b"]).processor({})
Bundles = Callable[..., Path]
VARIANTS: dict[str, dict[str, Any]] = {
    "no crop": {"do_center_crop": False},
    "no crop, square size": {"do_center_crop": False, "size": {"height": 224, "width": 224}},
    "bilinear": {"resample": 2},
    "lanczos": {"resample": 1},
    "height and width": {"size": {"height": 336, "width": 448}},
    "crop larger than the image": {"size": {"shortest_edge": 215}},
    "crop larger in height only": {"size": {"height": 201, "width": 400}, "crop_size": {"height": 336, "width": 224}},
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


def assert_equal_to_transformers(path: Path, settings: dict[str, Any]) -> None:
    kind = LlavaImageProcessorPil if settings["do_pad"] else CLIPImageProcessorPil
    processor = kind(**{**settings, "do_pad": settings["do_pad"] or None})
    with Image.open(path) as image:
        expected = processor(ImageOps.exif_transpose(image), return_tensors="np")["pixel_values"][0]
    found = SquareProcessor(settings)(read_image(path))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize("do_pad", [False, True], ids=["clip", "llava padded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers_with_other_settings(variant: str, do_pad: bool, photo_file: Path) -> None:
    assert_equal_to_transformers(photo_file, {**SETTINGS, **VARIANTS[variant], "do_pad": do_pad})


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "P+key", "L+key", "RGB+key", *range(2, 9)])
def test_equals_transformers_for_other_modes_and_orientations(
    mode: str | int, photo: Image.Image, tmp_path: Path
) -> None:
    """`mode+key` has one of its colours transparent, and a number is an orientation in the EXIF data."""
    exif, size = Image.Exif(), (317, 211)
    orientation, (kind, _, key) = (mode, ("RGB", "", "")) if isinstance(mode, int) else (1, mode.partition("+"))
    exif[0x0112] = orientation
    image = photo.resize(size).convert(kind)
    if kind in ("LA", "RGBA"):
        image.putalpha(Image.linear_gradient("L").resize(size))
    path = tmp_path / ("print.jpg" if kind == "CMYK" else "other.png")
    image.save(path, exif=exif, **({"transparency": COLOUR_KEYS[kind]} if key else {}))
    with Image.open(path) as saved:
        assert saved.mode == kind
    assert read_image(path).size == (size if orientation < 5 else size[::-1])
    assert_equal_to_transformers(path, SETTINGS)


def test_a_panorama_is_refused_with_its_size_and_the_ratio_that_works() -> None:
    with pytest.raises(ImageError, match=rf"30000x10.* {336 * 3000}") as caught:
        SquareProcessor(SETTINGS)(Image.new("RGB", (30000, 10)))
    ratio = int(str(caught.value).split(" below ")[1].split(":1")[0])
    assert SquareProcessor(SETTINGS).source_box((ratio, 1))[1::2] == (0, 1)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("size", LARGE_SIZES, ids=str)
def test_a_bright_square_in_a_tokens_box_brightens_that_patch_alone(
    size: tuple[int, int], fit: Fit, bundle: Bundles
) -> None:
    manifest = read_bundle(bundle("mha-336")).manifest
    family, black, seen = load_family(manifest, fit), Image.new("RGB", size), 0
    boxes, dark = family.layout(black).boxes, family.inputs(black)["pixel_values"][0]
    assert boxes.shape == (576, 4)
    for row, column in TOKENS:
        left, top, right, bottom = box = tuple(round(edge) for edge in boxes[row * 24 + column])
        if left < 0 or top < 0 or right > size[0] or bottom > size[1]:
            assert fit == "pad", "only padding lies outside the image"
            continue
        image = black.copy()
        image.paste((255, 255, 255), box)
        change = family.inputs(image)["pixel_values"][0] - dark
        # White is 1.
        grey = (change * np.array(manifest.processor["image_std"])[:, None, None]).mean(axis=0)
        patches = grey.reshape(24, 14, 24, 14).mean(axis=(1, 3))
        assert patches[row, column] > 0.9
        patches[row, column] = 0
        assert patches.max() < 0.07
        seen += 1
    assert seen >= 2


def rejection(call: Callable[[Picture], Any], picture: Image.Image) -> str:
    with pytest.raises(ImageError) as caught:
        call(picture)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "processor", "size", "advice"),
    [
        ("gqa-112", {}, (1, 40000), "Crop it to an aspect ratio below"),
        ("gqa-112", {"do_pad": True}, (1, 12000), "Scale it to at most 10000 pixels a side"),
        ("qwen", {}, (1, 201), "aspect ratios up to 200:1. Crop it."),
        ("pi0", {}, (1, 500), "whose sides differ less"),
    ],
)
def test_a_layout_rejects_what_the_inputs_reject_and_names_the_file(
    name: str, processor: dict[str, Any], size: tuple[int, int], advice: str, bundle: Bundles, tmp_path: Path
) -> None:
    manifest = read_bundle(bundle(name)).manifest
    family = load_family(replace(manifest, processor={**manifest.processor, **processor}))
    picture, file = Image.new("RGB", size), tmp_path / "long.png"
    said = rejection(family.inputs, picture)
    assert advice in said
    assert rejection(family.layout, picture) == said
    picture.save(file)
    assert rejection(lambda _: decoded(file, family), picture) == f"'{file}': {said}"
    assert rejection(lambda _: decoded(picture, family), picture) == said


@pytest.mark.parametrize("name", ["gqa-112", "next", "pi0", "qwen"])
def test_more_tokens_than_the_graphs_take_are_rejected(name: str, bundle: Bundles) -> None:
    manifest = replace(read_bundle(bundle(name)).manifest, most_visual_tokens=4)
    if name == "qwen":
        said = "224x112 pixels, which make 32 visual tokens; this bundle's graphs take up to 4"
        assert said in rejection(load_family(manifest).layout, Image.new("RGB", (224, 112)))
    else:
        with pytest.raises(BundleError, match="its graphs take up to 4"):
            load_family(manifest)
