"""The scenes that the pocket models learn from: pictures of one size, and varied ones of several sizes.

All things of a scene are known, so questions about it have one answer each (`questions`). Training, validation and
test scenes have different seeds, and test scenes have photos of their own. A larger picture holds more things of the
same size, and more background.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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


SIDE = 224
WIDE = 398
"""Width in pixels of a wide picture, 16:9."""
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = {
    "red": (214, 32, 38),
    "orange": (245, 140, 20),
    "yellow": (250, 225, 40),
    "green": (30, 150, 60),
    "blue": (35, 80, 210),
    "purple": (135, 45, 165),
}
POPULAR = tuple(zip(COLOURS, SHAPES, strict=True))
"""Frequent pairs of colour and shape: most scenes hold one, which rewards guessing."""
DIGITS = tuple("0123456789")
WORDS = tuple("STOP EXIT CAFE TAXI OPEN PARK BANK HOTEL GATE NORTH SALE BUS ZOO KEY".split())  # noqa: SIM905
RADII = {"small": 14, "large": 26}
"""Radius of an object in pixels."""

TEST_PICTURES = 80
_LATTICE = 7
"""Pixels between possible centres: half a patch, so that hours on two cores are enough to learn the shapes."""
_MARGIN = 8
"""Pixels between a text and the border of its frame."""
_OUTLINE = (20, 20, 20)
_LINE = 2
"""Width of outlines in pixels."""
_SUPERSAMPLING = 2
PHOTOS = {"training": TRAINING_PHOTOS, "validation": TRAINING_PHOTOS, "test": TEST_PHOTOS}
"""Photos of the backgrounds of each split."""


@dataclass(frozen=True)
class SceneObject:
    """An object (`text` is empty), a plate or a label (`shape` is ``plate`` or ``label``), with its box in pixels."""

    shape: str
    colour: str
    """The colour of an object, or of the frame of a plate or label."""
    size: str
    text: str
    x: int
    y: int
    half_width: int
    half_height: int
    points: int = 0
    """The size of the text; 0 for an object."""

    @property
    def pair(self) -> tuple[str, str]:
        """Colour and shape, by which a question names an object."""
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """Objects, plates and labels that do not overlap. A label is a plate with small text."""

    objects: tuple[SceneObject, ...]
    plates: tuple[SceneObject, ...]
    labels: tuple[SceneObject, ...] = ()
    size: tuple[int, int] = (SIDE, SIDE)
    """Width and height of the picture in pixels."""

    @property
    def things(self) -> tuple[SceneObject, ...]:
        """Return all objects, plates and labels."""
        return (*self.objects, *self.plates, *self.labels)


def compose_scene(split: str, index: int) -> Scene:
    """Return scene `index` of `split` (training, validation, test) without drawing it."""
    return _compose(Random(f"{split} {index}"))


def make_scene(split: str, index: int, width: int = SIDE) -> tuple[Scene, Image.Image]:
    """Return scene `index` of `split` (training, validation, test) and its picture, RGB of `width` x 224 pixels.

    In a picture wider than 224 pixels things have the same size, and their distances grow with the width.
    """
    rng = Random(f"{split} {index}")
    scene = _compose(rng)
    behind = background(rng, SIDE, PHOTOS[split])
    if width != SIDE:
        scene = Scene(_spread(scene.objects, width), _spread(scene.plates, width), size=(width, SIDE))
    return scene, draw_scene(scene, behind)


class Placer:
    """Places things at random in an area of a picture, apart from those placed before."""

    def __init__(self, rng: Random, left: int, top: int, width: int, height: int) -> None:
        self.placed: list[SceneObject] = []
        self._rng, self._left, self._top, self._width, self._height = rng, left, top, width, height

    def place(self, shape: str, colour: str, size: str, text: str, points: int = 0) -> None:
        """Place an object, or a plate or label with `text` of `points`; does nothing if no room is found."""
        half_width = half_height = RADII.get(size, 0)
        if text:
            width, height = _text_size(text, points)
            half_width, half_height = width // 2 + _MARGIN, height // 2 + _MARGIN
        for _ in range(30):
            x = self._on_lattice(self._left + half_width + 2, self._left + self._width - half_width - 2)
            y = self._on_lattice(self._top + half_height + 2, self._top + self._height - half_height - 2)
            thing = SceneObject(shape, colour, size, text, x, y, half_width, half_height, points)
            if not any(_touch(thing, other) for other in self.placed):
                self.placed.append(thing)
                return

    def _on_lattice(self, first: int, last: int) -> int:
        return self._rng.randrange(-(-first // _LATTICE) * _LATTICE, last + 1, _LATTICE)


def _compose(rng: Random) -> Scene:
    # Some scenes leave most of the picture empty.
    crowded = rng.random() < 0.7
    side = SIDE if crowded else SIDE * 2 // 3
    left, top = rng.randint(0, SIDE - side), rng.randint(0, SIDE - side)
    placer = Placer(rng, left, top, side, side)
    frames = rng.sample(list(COLOURS), 2 if crowded and rng.random() < 0.4 else 1)
    for frame in frames:
        text = rng.choice(DIGITS if rng.random() < 0.5 else WORDS)
        placer.place("plate", frame, "", text, plate_points(text))
    plates = tuple(placer.placed)
    for colour, shape in draw_pairs(rng, rng.randint(3, 6) if crowded else rng.randint(1, 3)):
        placer.place(shape, colour, rng.choice(list(RADII)), "")
    # Compose again in the rare case that no object found room.
    objects = tuple(placer.placed[len(plates) :])
    return Scene(objects, plates) if objects else _compose(rng)


def draw_pairs(rng: Random, count: int) -> list[tuple[str, str]]:
    """Return colours and shapes of a scene's objects. In most scenes some share one, for questions of counting."""
    pairs = [
        rng.choice(POPULAR) if rng.random() < 0.25 else (rng.choice(list(COLOURS)), rng.choice(SHAPES))
        for _ in range(count)
    ]
    sharing = rng.choice(["colour", "shape", "shape", ""])
    for i in range(rng.randint(2, 4) if sharing else 0):
        if i < count:
            pairs[i] = (pairs[0][0], pairs[i][1]) if sharing == "colour" else (pairs[i][0], pairs[0][1])
    rng.shuffle(pairs)
    return pairs


def _touch(a: SceneObject, b: SceneObject) -> bool:
    gap = 4
    apart_x = abs(a.x - b.x) >= a.half_width + b.half_width + gap
    apart_y = abs(a.y - b.y) >= a.half_height + b.half_height + gap
    return not (apart_x or apart_y)


def _spread(things: tuple[SceneObject, ...], width: int) -> tuple[SceneObject, ...]:
    """Return the things with distances that fill `width`, on the lattice of the square in the picture's middle."""
    start = (width - SIDE) // 2
    return tuple(
        replace(thing, x=start + round((thing.x * width / SIDE - start) / _LATTICE) * _LATTICE) for thing in things
    )


def draw_scene(scene: Scene, behind: Image.Image) -> Image.Image:
    """Return the picture of `scene` before the background `behind`, which is resized to the scene."""
    width, height = scene.size
    canvas = behind.resize((width * _SUPERSAMPLING, height * _SUPERSAMPLING))
    draw = ImageDraw.Draw(canvas)
    for thing in scene.objects:
        _draw_object(draw, thing)
    for plate in (*scene.plates, *scene.labels):
        x, y = plate.x * _SUPERSAMPLING, plate.y * _SUPERSAMPLING
        across, down = plate.half_width * _SUPERSAMPLING, plate.half_height * _SUPERSAMPLING
        box = [x - across, y - down, x + across, y + down]
        draw.rectangle(box, fill=(248, 248, 244), outline=COLOURS[plate.colour], width=4 * _SUPERSAMPLING)
        draw.text((x, y), plate.text, fill=_OUTLINE, font=_font(plate.points * _SUPERSAMPLING), anchor="mm")
    return canvas.resize((width, height), Image.Resampling.BOX)


def _draw_object(draw: ImageDraw.ImageDraw, thing: SceneObject) -> None:
    x, y, r = thing.x * _SUPERSAMPLING, thing.y * _SUPERSAMPLING, thing.half_width * _SUPERSAMPLING
    fill, line = COLOURS[thing.colour], _LINE * _SUPERSAMPLING
    if thing.shape == "circle":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=fill, outline=_OUTLINE, width=line)
    elif thing.shape == "ring":
        draw.ellipse([x - r, y - r, x + r, y + r], outline=_OUTLINE, width=r // 2)
        draw.ellipse([x - r + line, y - r + line, x + r - line, y + r - line], outline=fill, width=r // 2 - 2 * line)
    else:
        corners = [(x + r * u, y + r * v) for u, v in _corners(thing.shape)]
        draw.polygon(corners, fill=fill, outline=_OUTLINE, width=line)


def _corners(shape: str) -> list[tuple[float, float]]:
    if shape == "square":
        return [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]
    if shape == "triangle":
        return [(0, -1), (1, 0.9), (-1, 0.9)]
    if shape == "star":
        radii = (1.0, 0.42)
        turns = [math.pi * i / 5 for i in range(10)]
        return [(radii[i % 2] * math.sin(turn), -radii[i % 2] * math.cos(turn)) for i, turn in enumerate(turns)]
    # A cross: rotate one arm three times.
    corners = [(-0.34, -1.0), (0.34, -1.0), (0.34, -0.34)]
    for _ in range(3):
        corners += [(-y, x) for x, y in corners[-3:]]
    return corners


def plate_points(text: str) -> int:
    """Return the size of a plate's text: digits are larger than words."""
    return 24 if len(text) == 1 else 17


def _font(points: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(points)


def _text_size(text: str, points: int) -> tuple[int, int]:
    left, top, right, bottom = _font(points).getbbox(text)
    return math.ceil(right - left), math.ceil(bottom - top)


UNIT = 28
"""Pixels along a side of a visual token of the model; sides of pictures are multiples."""
SIZES = (
    *((224, 224), (280, 224), (224, 280), (336, 224), (224, 336), (280, 280), (336, 280), (280, 336)),
    *((336, 336), (448, 224), (224, 448), (392, 336), (336, 392), (448, 336), (336, 448), (392, 392), (448, 448)),
)
"""Widths and heights of pictures in pixels: 64 to 256 visual tokens."""
MOST_TOKENS = 256
"""Visual tokens of the largest picture."""
VARIED_TEST_PICTURES = 60
_LABEL_POINTS = 10
"""The size of a label's text. Letters of 7 pixels cannot be read in a picture of half the side."""
_MATCHED = 0.6
"""How often a plate or label has the colour of an object whose shape no other object has."""


def compose_varied(split: str, index: int) -> Scene:
    """Return scene `index` of `split` (training, validation, test) without drawing it."""
    return _compose_varied(Random(f"varied {split} {index}"))


def make_varied(split: str, index: int) -> tuple[Scene, Image.Image]:
    """Return scene `index` of `split` (training, validation, test) and its picture, RGB of the scene's size."""
    rng = Random(f"varied {split} {index}")
    scene = _compose_varied(rng)
    width, height = scene.size
    side = max(scene.size)
    return scene, draw_scene(scene, background(rng, side, PHOTOS[split]).crop((0, 0, width, height)))


def _compose_varied(rng: Random) -> Scene:
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
    return Scene(objects, plates, labels, (width, height)) if objects and plates and labels else _compose_varied(rng)


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
