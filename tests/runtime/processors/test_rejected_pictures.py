"""Pictures that a model cannot take are rejected by their layout already, with the file's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError, ImageError
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.steps.pictures import decoded

Bundles = Callable[..., Path]
CASES = [
    ("gqa-112", {}, (1, 40000), "Crop it to an aspect ratio below"),
    ("gqa-112", {"do_pad": True}, (1, 12000), "Scale it to at most 10000 pixels a side"),
    ("qwen", {}, (1, 201), "aspect ratios up to 200:1. Crop it."),
    ("pi0", {}, (1, 500), "whose sides differ less"),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[2][1]}")
def case(request: pytest.FixtureRequest, bundle: Bundles) -> tuple[Family, Image.Image, str]:
    name, processor, size, advice = request.param
    manifest = read_bundle(bundle(name)).manifest
    family = load_family(replace(manifest, processor={**manifest.processor, **processor}))
    return family, Image.new("RGB", size), advice


def rejection(call: Callable[[Picture], Any], picture: Image.Image) -> str:
    with pytest.raises(ImageError) as caught:
        call(picture)
    return str(caught.value)


def test_a_layout_rejects_what_the_inputs_reject(case: tuple[Family, Image.Image, str]) -> None:
    family, picture, advice = case
    said = rejection(family.inputs, picture)
    assert advice in said
    assert rejection(family.layout, picture) == said


def test_the_message_about_a_file_has_its_name(case: tuple[Family, Image.Image, str], tmp_path: Path) -> None:
    family, picture, _ = case
    file = tmp_path / "long.png"
    picture.save(file)
    said = rejection(family.layout, picture)
    assert rejection(lambda _: decoded(file, family), picture) == f"'{file}': {said}"
    assert rejection(lambda _: decoded(picture, family), picture) == said


@pytest.mark.parametrize("name", ["gqa-112", "next", "pi0"])
def test_a_tower_with_more_tokens_than_its_graphs_take_is_rejected(name: str, bundle: Bundles) -> None:
    with pytest.raises(BundleError, match="its graphs take up to 4"):
        load_family(replace(read_bundle(bundle(name)).manifest, most_visual_tokens=4))


def test_a_bundle_for_small_pictures_rejects_more_tokens(bundle: Bundles) -> None:
    manifest = read_bundle(bundle("qwen")).manifest
    family, picture = load_family(replace(manifest, most_visual_tokens=4)), Image.new("RGB", (224, 112))
    tokens = load_family(manifest).layout(picture).tokens
    assert tokens > 4
    said = f"224x112 pixels, which make {tokens} visual tokens; this bundle's graphs take up to 4"
    assert said in rejection(family.layout, picture)
