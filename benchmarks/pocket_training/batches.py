"""The batch of a training step: pictures, what each patch shows, and questions packed after one picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from pocket_training.model import AFTER, ANSWER, BEFORE, EOS, GRID, PAD, PATCH
from sinkprune.contract.text.questions import Question
from sinkprune.demo.scene_questions import plural
from sinkprune.demo.scenes import COLOURS, DIGITS, RADII, SHAPES, WORDS, Scene, compose_scene, make_scene

_SHAPES = ("", *SHAPES, "plate")
_COLOURS = ("", *COLOURS)
_SIZES = ("", *RADII)
_TEXTS = ("", *DIGITS, *WORDS)
_SHOWN = (_SHAPES, _COLOURS, _SIZES, _TEXTS)
CLASSES = (*map(len, _SHOWN), 2)
"""The classes of a patch: shape, colour, size and text of the thing it shows, 0 for none; and whether it holds the
thing's centre. A thing has one centre whatever its size, so centres can be counted."""
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
    """[B,V,5] int64: `CLASSES` of each patch."""
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
    """[B,T] token ids after the picture, of all turns in a row."""
    turn: torch.Tensor
    """[B,T] the number of the turn from 1 on, -1 for padding."""
    place: torch.Tensor
    """[B,T] position within the turn."""
    targets: torch.Tensor
    """[B,T] the next token where it is part of an answer, else -100."""


def normalised(picture: Image.Image) -> torch.Tensor:
    """Return [3,224,224] fp32, equal to the output of the checkpoint's image processor."""
    values = torch.from_numpy(np.asarray(picture, np.float32) / 255).permute(2, 0, 1)
    return (values - _MEAN) / _STD


def pictures(scenes: list[tuple[Scene, Image.Image]], shown: int = GRID * GRID, seed: int = 0) -> Pictures:
    """Return pictures with dense targets and `shown` patches of each: centres, then things, then background."""
    targets = [_patch_targets(scene) for scene, _ in scenes]
    rng = np.random.default_rng(seed)
    patches = np.stack([_show(classes, shown, rng) for classes, _ in targets])
    return Pictures(
        torch.stack([normalised(picture) for _, picture in scenes]),
        torch.from_numpy(patches),
        torch.from_numpy(np.stack([targets[i][0][row] for i, row in enumerate(patches)])),
        torch.from_numpy(np.stack([targets[i][1][row] for i, row in enumerate(patches)])),
        torch.stack([_summary(scene) for scene, _ in scenes]),
    )


def _show(classes: np.ndarray, shown: int, rng: np.random.Generator) -> np.ndarray:
    preference = rng.random(len(classes)) + (classes[:, 0] > 0) + classes[:, -1]
    return np.sort(np.argsort(-preference)[:shown])


def training_scenes(first: int, count: int, most_objects: int) -> list[tuple[Scene, Image.Image]]:
    """Return the training scenes from `first` on, with another in place of each with more than `most_objects`."""
    return [make_scene("training", _with_few(index, most_objects)) for index in range(first, first + count)]


def _with_few(index: int, most_objects: int) -> int:
    """Return the first of the scenes `index`, `index` + a million, ... with at most `most_objects`."""
    while len(compose_scene("training", index).objects) > most_objects:
        index += 1_000_000
    return index


def turns(asked: list[list[Question]], tokenizer: Tokenizer) -> Turns:
    """Pack the questions about each picture, with their answers."""
    rows = [[_turn(q.prompt, q.in_words, tokenizer) for q in row] for row in asked]
    length = max(sum(len(ids) for ids, _ in row) for row in rows)
    shape = (len(rows), length)
    ids, place = np.full(shape, PAD, np.int64), np.zeros(shape, np.int64)
    turn, targets = np.full(shape, -1, np.int64), np.full(shape, -100, np.int64)
    for i, row in enumerate(rows):
        at = 0
        for number, (tokens, answer) in enumerate(row, 1):
            span = slice(at, at + len(tokens))
            ids[i, span], turn[i, span], place[i, span] = tokens, number, range(len(tokens))
            # Each row predicts the next token.
            targets[i, span.stop - answer - 1 : span.stop - 1] = tokens[-answer:]
            at = span.stop
    before = torch.tensor(tokenizer.encode(BEFORE).ids)
    return Turns(before, *(torch.from_numpy(array) for array in (ids, turn, place, targets)))


class Words(NamedTuple):
    """Token ids of words, in the order of `Pictures.classes` from 1 on."""

    shapes: torch.Tensor
    colours: torch.Tensor
    sizes: torch.Tensor
    plurals: torch.Tensor
    """Plurals of the shapes."""


def words(tokenizer: Tokenizer) -> Words:
    plurals = [plural(word) for word in _SHAPES]
    ids = [
        [tokenizer.encode(f" {word}", add_special_tokens=False).ids[0] for word in group[1:]]
        for group in (_SHAPES, _COLOURS, _SIZES, plurals)
    ]
    return Words(*map(torch.tensor, ids))


def _turn(prompt: str, answer: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Return the token ids of a question and its answer, and the length of the answer."""
    asked = tokenizer.encode(AFTER.format(prompt), add_special_tokens=False).ids
    replied = [*tokenizer.encode(ANSWER.format(answer), add_special_tokens=False).ids, EOS]
    return asked + replied, len(replied)


def _patch_targets(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    classes = np.zeros((GRID, GRID, len(CLASSES)), np.int64)
    centres = np.zeros((GRID, GRID, 2), np.float32)
    y, x = (np.mgrid[0:GRID, 0:GRID] + 0.5) * PATCH
    for thing in (*scene.objects, *scene.plates):
        inside = abs(x - thing.x) <= thing.half_width + _PATCH_MARGIN
        inside &= abs(y - thing.y) <= thing.half_height + _PATCH_MARGIN
        shown = zip(_SHOWN, (thing.shape, thing.colour, thing.size, thing.text), strict=True)
        classes[inside] = (*(names.index(name) for names, name in shown), 0)
        classes[thing.y // PATCH, thing.x // PATCH, -1] = 1
        centres[inside] = np.array([thing.x, thing.y]) / PATCH - GRID / 2
    return classes.reshape(-1, len(CLASSES)), centres.reshape(-1, 2)


def _summary(scene: Scene) -> torch.Tensor:
    summary = torch.zeros(SUMMARY)
    for thing in scene.objects:
        summary[list(COLOURS).index(thing.colour) * len(SHAPES) + SHAPES.index(thing.shape)] = 1
    for plate in scene.plates:
        summary[len(COLOURS) * len(SHAPES) + _TEXTS.index(plate.text)] = 1
    return summary
