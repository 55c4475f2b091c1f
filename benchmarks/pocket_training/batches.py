"""The batch of a training step: pictures, what each patch shows, and questions packed after one picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from pocket_training.model import DIALOGUE, GRID, PATCH, Dialogue
from sinkprune.contract.questions import Question
from sinkprune.demo.questions import plural
from sinkprune.demo.scenes import COLOURS, DIGITS, RADII, SHAPES, WORDS, Scene, compose_scene, make_scene

_COLOURS = ("", *COLOURS)
_SIZES = ("", *RADII)
_TEXTS = ("", *DIGITS, *WORDS)


@dataclass(frozen=True)
class Names:
    """The names of what a patch can show."""

    shapes: tuple[str, ...] = (*SHAPES, "plate")

    @property
    def shown(self) -> tuple[tuple[str, ...], ...]:
        """Return the shapes, colours, sizes and texts, each with "" for none first."""
        return ("", *self.shapes), _COLOURS, _SIZES, _TEXTS

    @property
    def classes(self) -> tuple[int, ...]:
        """Return how many classes a patch has: of shape, colour, size and text of the thing it shows, 0 for none.

        The last two classes are whether the patch holds the thing's centre. A thing has one centre whatever its size,
        so centres can be counted.
        """
        return (*map(len, self.shown), 2)


_CHUNK = 72
"""Tokens of a chunk, if no turn is longer. A multiple choice has about as many."""
SUMMARY = len(COLOURS) * len(SHAPES) + len(_TEXTS)
"""The classes of a picture: the pairs of colour and shape, and the texts, that it holds."""

_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)
_PATCH_MARGIN = 4
"""Pixels around a thing's box that still belong to it, so that small things own some patches."""


@dataclass
class Pictures:
    """B pictures, V patches of each, and what these show."""

    pixels: torch.Tensor
    """[B,3,224,224] fp32, normalised as CLIP's."""
    patches: torch.Tensor
    """[B,V] int64, ascending: the patches of each picture that exist."""
    classes: torch.Tensor
    """[B,V,5] int64: `Names.classes` of each patch."""
    centres: torch.Tensor
    """[B,V,2] fp32: x and y of the shown thing's centre, in patches from the picture's centre."""
    summary: torch.Tensor
    """[B,`SUMMARY`] fp32, 0 or 1."""


@dataclass
class Turns:
    """Questions and answers after B pictures. Each turn attends to the picture and itself only."""

    before: torch.Tensor
    """[P] token ids before the picture."""
    ids: torch.Tensor
    """[B,T] token ids after the picture, of all turns in a row. Padding keeps each turn in one chunk."""
    turn: torch.Tensor
    """[B,T] the number of the turn from 1 on, -1 for padding."""
    place: torch.Tensor
    """[B,T] position within the turn."""
    targets: torch.Tensor
    """[B,T] the next token where it is part of an answer, else -100."""
    chunk: int
    """Tokens of a chunk; T is a multiple."""


def normalised(picture: Image.Image) -> torch.Tensor:
    """Return [3,224,224] fp32, equal to the output of the checkpoint's image processor."""
    values = torch.from_numpy(np.asarray(picture, np.float32) / 255).permute(2, 0, 1)
    return (values - _MEAN) / _STD


def pictures(scenes: list[tuple[Scene, Image.Image]], shown: int = GRID * GRID, seed: int = 0) -> Pictures:
    """Return pictures with dense targets and `shown` patches of each: centres, then things, then background."""
    targets = [patch_targets(scene, PATCH, Names()) for scene, _ in scenes]
    rng = np.random.default_rng(seed)
    patches = np.stack([show(classes, shown, rng) for classes, _ in targets])
    return Pictures(
        torch.stack([normalised(picture) for _, picture in scenes]),
        torch.from_numpy(patches),
        torch.from_numpy(np.stack([targets[i][0][row] for i, row in enumerate(patches)])),
        torch.from_numpy(np.stack([targets[i][1][row] for i, row in enumerate(patches)])),
        torch.stack([_summary(scene) for scene, _ in scenes]),
    )


def show(classes: np.ndarray, shown: int, rng: np.random.Generator) -> np.ndarray:
    """Return the places of `shown` patches of `classes` [V,5], ascending: centres first, then things, then others."""
    preference = rng.random(len(classes)) + (classes[:, 0] > 0) + classes[:, -1]
    return np.sort(np.argsort(-preference)[:shown])


def training_scenes(first: int, count: int, most_objects: int) -> list[tuple[Scene, Image.Image]]:
    """Return the training scenes from `first` on, with another in place of each with more than `most_objects`."""

    def has_few(index: int) -> bool:
        return len(compose_scene("training", index).objects) <= most_objects

    return [make_scene("training", first_of(index, has_few)) for index in range(first, first + count)]


def first_of(index: int, fits: Callable[[int], bool]) -> int:
    """Return the first of the scenes `index`, `index` + a million, ... that fits."""
    while not fits(index):
        index += 1_000_000
    return index


def turns(asked: list[list[Question]], tokenizer: Tokenizer, dialogue: Dialogue = DIALOGUE) -> Turns:
    """Pack the questions about each picture, with their answers."""
    rows = [[_turn(q.prompt, q.in_words, tokenizer, dialogue) for q in row] for row in asked]
    chunk = max(_CHUNK, *(len(ids) for row in rows for ids, _ in row))
    starts = [_starts([len(ids) for ids, _ in row], chunk) for row in rows]
    # A scene may allow none of the kinds drawn for it.
    length = max(at[-1] + len(row[-1][0]) for at, row in zip(starts, rows, strict=True) if row)
    shape = (len(rows), math.ceil(length / chunk) * chunk)
    ids, place = np.full(shape, dialogue.padding, np.int64), np.zeros(shape, np.int64)
    turn, targets = np.full(shape, -1, np.int64), np.full(shape, -100, np.int64)
    for i, row in enumerate(rows):
        for number, (at, (tokens, answer)) in enumerate(zip(starts[i], row, strict=True), 1):
            span = slice(at, at + len(tokens))
            ids[i, span], turn[i, span], place[i, span] = tokens, number, range(len(tokens))
            # Each row predicts the next token.
            targets[i, span.stop - answer - 1 : span.stop - 1] = tokens[-answer:]
    before = torch.tensor(tokenizer.encode(dialogue.before).ids)
    arrays = [torch.from_numpy(array) for array in (ids, turn, place, targets)]
    return Turns(before, arrays[0], arrays[1], arrays[2], arrays[3], chunk)


def _starts(lengths: list[int], chunk: int) -> list[int]:
    """Return where turns of these lengths start, such that each lies within one chunk."""
    starts, at = [], 0
    for length in lengths:
        if at // chunk != (at + length - 1) // chunk:
            at = -(-at // chunk) * chunk
        starts.append(at)
        at += length
    return starts


class Words(NamedTuple):
    """Token ids of words, in the order of `Pictures.classes` from 1 on."""

    shapes: torch.Tensor
    colours: torch.Tensor
    sizes: torch.Tensor
    plurals: torch.Tensor
    """Plurals of the shapes."""


def words(tokenizer: Tokenizer, names: Names | None = None) -> Words:
    """Return the token ids of `names`, by default those of the square scenes."""
    shapes = (names or Names()).shapes
    plurals = tuple(map(plural, shapes))
    ids = [
        [tokenizer.encode(f" {word}", add_special_tokens=False).ids[0] for word in group]
        for group in (shapes, COLOURS, RADII, plurals)
    ]
    return Words(*map(torch.tensor, ids))


def _turn(prompt: str, answer: str, tokenizer: Tokenizer, dialogue: Dialogue) -> tuple[list[int], int]:
    """Return the token ids of a question and its answer, and the length of the answer."""
    asked = tokenizer.encode(dialogue.after.format(prompt), add_special_tokens=False).ids
    replied = [*tokenizer.encode(f" {answer}", add_special_tokens=False).ids, dialogue.end]
    return asked + replied, len(replied)


def patch_targets(scene: Scene, side: int, names: Names) -> tuple[np.ndarray, np.ndarray]:
    """Return [V,5] int64 and [V,2] fp32: what each patch of `side` pixels shows, in raster order, and its centre.

    The second is x and y of the shown thing's centre, from the picture's centre, in sixteenths of the picture.
    """
    columns, rows = (length // side for length in scene.size)
    classes = np.zeros((rows, columns, len(names.classes)), np.int64)
    centres = np.zeros((rows, columns, 2), np.float32)
    y, x = (np.mgrid[0:rows, 0:columns] + 0.5) * side
    at_centre = {}
    for thing in scene.things:
        inside = abs(x - thing.x) <= thing.half_width + _PATCH_MARGIN
        inside &= abs(y - thing.y) <= thing.half_height + _PATCH_MARGIN
        given = zip(names.shown, (thing.shape, thing.colour, thing.size, thing.text), strict=True)
        shown = tuple(group.index(name) for group, name in given)
        classes[inside] = (*shown, 0)
        place = thing.y // side, thing.x // side
        at_centre[place] = (*shown, 1)
        inside[place] = True
        centres[inside] = (np.array([thing.x, thing.y]) / scene.size - 0.5) * GRID
    # A large patch may hold the centre of one thing, and have its own centre next to another.
    for place, shown in at_centre.items():
        classes[place] = shown
    return classes.reshape(-1, len(names.classes)), centres.reshape(-1, 2)


def _summary(scene: Scene) -> torch.Tensor:
    summary = torch.zeros(SUMMARY)
    for thing in scene.objects:
        summary[list(COLOURS).index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape)] = 1
    for plate in scene.plates:
        summary[len(COLOURS) * len(SHAPES) + _TEXTS.index(plate.text)] = 1
    return summary
