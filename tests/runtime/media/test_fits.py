"""Each fit equals transformers with such settings, and the share of the picture that the model sees is exact."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaImageProcessorPil

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import Manifest
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.families import read_family
from sinkprune.runtime.families import FITS, Fit, load_family
from sinkprune.runtime.families.llava import SquareProcessor

Bundles = Callable[..., Path]
SIDE = 56
SQUARE = {"height": SIDE, "width": SIDE}
SETTINGS: dict[str, Any] = {
    **read_family("preset", PRESETS["llava-1.5-7b"]).processor({}),
    "size": {"shortest_edge": SIDE},
    "crop_size": SQUARE,
}
OTHERS: dict[str, dict[str, Any]] = {
    "crops": {},
    "pads": {"do_pad": True},
    "stretches": {"size": SQUARE, "do_center_crop": False},
    "stretches to another size": {"size": {"height": 40, "width": 60}, "do_center_crop": False},
    "does nothing": {"do_resize": False, "do_center_crop": False},
}
"""What a checkpoint does by itself, where nobody chooses a fit."""
THEIRS = {
    "crop": CLIPImageProcessorPil(**{**SETTINGS, "do_pad": None}),
    "pad": LlavaImageProcessorPil(**{**SETTINGS, "do_pad": True}),
    "stretch": CLIPImageProcessorPil(**{**SETTINGS, **OTHERS["stretches"], "do_pad": None}),
}
"""The processors of transformers that do what a fit does."""


def noise(size: tuple[int, int]) -> Image.Image:
    """A picture without two pixels alike."""
    width, height = size
    return Image.fromarray(
        np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), np.uint8)
    )


@pytest.mark.parametrize("own", OTHERS)
@pytest.mark.parametrize("fit", FITS)
@given(size=st.tuples(st.integers(1, 130), st.integers(1, 130)))
@example((128, 72))
@example((72, 128))
@example((57, 56))
@example((1, 130))
def test_a_fit_equals_transformers_whatever_the_checkpoint_does(fit: Fit, own: str, size: tuple[int, int]) -> None:
    image = noise(size)
    found = SquareProcessor({**SETTINGS, **OTHERS[own]}).fitted(fit, SIDE)(image)
    assert found.shape == (3, SIDE, SIDE)
    assert np.abs(found - THEIRS[fit](image, return_tensors="np")["pixel_values"][0]).max() < 1e-5


@pytest.fixture(scope="module")
def manifest(bundle: Bundles) -> Manifest:
    """The manifest of a bundle with 24x24 visual tokens."""
    return read_bundle(bundle("mha-336")).manifest


def share(family: Any, size: tuple[int, int]) -> float:
    found: float = family.layout(Image.new("RGB", size)).seen_share
    return found


@settings(max_examples=30)
@given(size=st.tuples(st.integers(1, 1500), st.integers(1, 1500)).filter(lambda size: max(size) < 20 * min(size)))
@example(size=(1280, 720))
def test_the_seen_share_is_exact(size: tuple[int, int], manifest: Manifest) -> None:
    cropping = Fraction(336, 336 * max(size) // min(size))
    assert share(load_family(manifest), size) == pytest.approx(float(cropping), rel=1e-12)
    assert share(load_family(manifest, "crop"), size) == share(load_family(manifest), size)
    assert share(load_family(manifest, "pad"), size) == 1
    assert share(load_family(manifest, "stretch"), size) == 1


@pytest.mark.parametrize("name", ["next", "qwen", "qwen2-vl", "qwen3-vl", "internvl"])
def test_families_that_see_the_whole_picture_refuse_a_fit(name: str, bundle: Bundles) -> None:
    root = bundle(name)
    for fit in FITS:
        with pytest.raises(UsageError, match=f"fit is '{fit}', but models of .* picture already. Leave out"):
            Pipeline.load(root, fit=fit)
    assert share(load_family(read_bundle(root).manifest), (90, 40)) == 1
