"""What a training asks that no test set does: drawn questions, lessons, descriptions, and smaller pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from PIL import Image

from sinkprune.contract.questions import Question
from sinkprune.demo.questions import KINDS, Draft, QuestionMaker, all_by, ask, named
from sinkprune.demo.scenes import UNIT, Scene, SceneObject


def draw_questions(
    scene: Scene, rng: Random, count: int, kinds: Sequence[str], makers: Mapping[str, QuestionMaker] | None = None
) -> list[Question]:
    """Return up to `count` questions of kinds drawn from `kinds`; `makers` are by default `KINDS` and `LESSONS`."""
    known = makers or KINDS | LESSONS
    drawn = rng.choices(kinds, k=count)
    return [question for i, kind in enumerate(drawn) for question in ask(known[kind], scene, rng, kind, str(i))]


def description(scene: Scene) -> Question:
    """Return a question whose answer lists all things from the top down, for training only."""
    things = sorted(scene.things, key=lambda thing: (thing.y, thing.x))
    said = [f"{named(t.pair)} {t.text}" if t.text else f"{t.size} {named(t.pair)}" for t in things]
    return Question("description", "description", "What is in the picture?", (", ".join(said),))


def _place(scene: Scene, rng: Random) -> Draft | None:
    """Ask for a thing's place, as a lesson for relations."""
    unique = all_by(scene.objects, lambda thing: thing.pair)
    if not unique:
        return None
    thing, (width, height) = rng.choice(unique), scene.size
    row, column = (
        ("top", "middle", "bottom")[3 * thing.y // height],
        ("left", "centre", "right")[3 * thing.x // width],
    )
    return Draft(f"Where is the {named(thing.pair)}?", f"{row} {column}")


LESSONS: dict[str, QuestionMaker] = {"place": _place}
"""Kinds for training only, which prepare for the others."""


def shrink(scene: Scene, picture: Image.Image, factor: float) -> tuple[Scene, Image.Image]:
    """Return a scene and its picture in about `factor` of their size, in whole visual tokens.

    Models see such pictures with `--method downsample`.
    """
    width, height = (max(1, round(side * factor / UNIT)) * UNIT for side in scene.size)
    across, down = width / scene.size[0], height / scene.size[1]

    def smaller(things: tuple[SceneObject, ...]) -> tuple[SceneObject, ...]:
        return tuple(
            replace(
                thing,
                x=int(thing.x * across),
                y=int(thing.y * down),
                half_width=round(thing.half_width * across),
                half_height=round(thing.half_height * down),
            )
            for thing in things
        )

    shrunk = Scene(smaller(scene.objects), smaller(scene.plates), smaller(scene.labels), (width, height))
    return shrunk, picture.resize((width, height), Image.Resampling.BICUBIC)
