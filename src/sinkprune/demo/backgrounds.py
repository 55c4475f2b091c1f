"""Backgrounds of scenes: flat, gradient, noise, texture, or a crop of a photo."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

TRAINING_PHOTOS = ("astronaut", "brick", "chelsea", "grass", "gravel", "rocket")
TEST_PHOTOS = ("coffee", "hubble")
"""Photos that no training scene shows."""


def background(rng: Random, side: int, photos: tuple[str, ...]) -> Image.Image:
    """Draw a `side` x `side` picture of a random kind, with less contrast than objects have."""
    paint = rng.choice([_flat, _gradient, _noise, _texture])
    if rng.random() < 0.4:
        return _photo_crop(rng, side, rng.choice(photos))
    return Image.fromarray(np.clip(paint(rng, side), 0, 255).astype(np.uint8))


def _colour(rng: Random) -> np.ndarray[Any, Any]:
    """Return a greyish tone, unlike the objects' colours."""
    grey = rng.uniform(40, 220)
    return np.array([grey + rng.uniform(-25, 25) for _ in range(3)])


def _flat(rng: Random, side: int) -> np.ndarray[Any, Any]:
    return np.broadcast_to(_colour(rng), (side, side, 3))


def _gradient(rng: Random, side: int) -> np.ndarray[Any, Any]:
    y, x = np.mgrid[0:side, 0:side] / side
    along = rng.choice([x, y, (x + y) / 2, np.abs(2 * x - 1)])[..., None]
    return _colour(rng) * (1 - along) + _colour(rng) * along


def _noise(rng: Random, side: int) -> np.ndarray[Any, Any]:
    grain = np.random.default_rng(rng.getrandbits(64))
    size = side // rng.choice([1, 2, 4])
    speckle = grain.normal(0, rng.uniform(10, 30), (size, size, 3 if rng.random() < 0.5 else 1))
    coarse = np.kron(speckle, np.ones((side // size, side // size, 1)))
    return _colour(rng) + coarse


def _texture(rng: Random, side: int) -> np.ndarray[Any, Any]:
    """Draw stripes or a checkerboard of any width and direction."""
    y, x = np.mgrid[0:side, 0:side]
    width, angle = rng.uniform(6, 30), rng.uniform(0, np.pi)
    along = (x * np.cos(angle) + y * np.sin(angle)) // width % 2
    across = (y * np.cos(angle) - x * np.sin(angle)) // width % 2
    pattern = along if rng.random() < 0.5 else (along + across) % 2
    first = _colour(rng)
    return first + pattern[..., None] * rng.uniform(-40, 40)


def _photo_crop(rng: Random, side: int, name: str) -> Image.Image:
    photo = _photo(name)
    extent = rng.randint(min(side * 3 // 4, *photo.size), min(photo.size))
    left, top = rng.randint(0, photo.width - extent), rng.randint(0, photo.height - extent)
    return photo.resize((side, side), box=(left, top, left + extent, top + extent))


@cache
def _photo(name: str) -> Image.Image:
    with Image.open(Path(__file__).parent / "photos" / f"{name}.jpg") as photo:
        return photo.convert("RGB")
