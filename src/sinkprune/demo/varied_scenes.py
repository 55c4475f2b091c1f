"""Seeded scenes of several resolutions, with labels of small text: what the pocket model of any resolution is asked.

Things are drawn as in `scenes`, at the same sizes in pixels. A larger picture holds more things and more background.
"""

from __future__ import annotations

from random import Random

from PIL import Image

from sinkprune.demo.backgrounds import background
from sinkprune.demo.scenes import (
    COLOURS,
    DIGITS,
    PHOTOS,
    RADII,
    WORDS,
    Placer,
    Scene,
    draw_pairs,
    draw_scene,
    plate_points,
)

UNIT = 28
"""Pixels along a side of a visual token of the model; sides of pictures are multiples."""
SIZES = (
    *((224, 224), (280, 224), (224, 280), (336, 224), (224, 336), (280, 280), (336, 280), (280, 336)),
    *((336, 336), (448, 224), (224, 448), (392, 336), (336, 392), (448, 336), (336, 448), (392, 392), (448, 448)),
)
"""Widths and heights of pictures in pixels: 64 to 256 visual tokens."""
MOST_TOKENS = 256
"""Visual tokens of the largest picture."""
TEST_PICTURES = 60
_LABEL_POINTS = 10
"""The size of a label's text. Letters of 7 pixels cannot be read in a picture of half the side."""
_MATCHED = 0.6
"""How often a plate or label has the colour of an object whose shape no other object has."""


def compose_varied(split: str, index: int) -> Scene:
    """Return scene `index` of `split` (training, validation, test) without drawing it."""
    return _compose(Random(f"varied {split} {index}"))


def make_varied(split: str, index: int) -> tuple[Scene, Image.Image]:
    """Return scene `index` of `split` (training, validation, test) and its picture, RGB of the scene's size."""
    rng = Random(f"varied {split} {index}")
    scene = _compose(rng)
    width, height = scene.size
    side = max(scene.size)
    return scene, draw_scene(scene, background(rng, side, PHOTOS[split]).crop((0, 0, width, height)))


def _compose(rng: Random) -> Scene:
    width, height = rng.choice(SIZES)
    most = 6 if width * height < 100 * UNIT**2 else 8
    pairs = draw_pairs(rng, rng.randint(2, most))
    placer = Placer(rng, 0, 0, width, height)
    for shape, texts in (("plate", rng.randint(1, 2)), ("label", rng.randint(1, 2))):
        for frame in _frames(rng, pairs, texts):
            text = rng.choice(DIGITS if rng.random() < 0.5 else WORDS)
            placer.place(shape, frame, "", text, plate_points(text) if shape == "plate" else _LABEL_POINTS)
    framed = len(placer.placed)
    for colour, shape in pairs:
        placer.place(shape, colour, rng.choice(list(RADII)), "")
    plates, labels = (tuple(t for t in placer.placed if t.shape == shape) for shape in ("plate", "label"))
    objects = tuple(placer.placed[framed:])
    # Compose again in the rare case that something found no room.
    return Scene(objects, plates, labels, (width, height)) if objects and plates and labels else _compose(rng)


def _frames(rng: Random, pairs: list[tuple[str, str]], count: int) -> list[str]:
    """Return `count` different colours of frames, often such that a question can name one by an object's shape."""
    shapes = [shape for _, shape in pairs]
    named = [colour for colour, shape in pairs if shapes.count(shape) == 1]
    frames: list[str] = []
    while len(frames) < count:
        colour = rng.choice(named if named and rng.random() < _MATCHED else list(COLOURS))
        if colour not in frames:
            frames.append(colour)
    return frames
