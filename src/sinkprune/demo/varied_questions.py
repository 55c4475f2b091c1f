"""Questions about scenes of several resolutions: small text, questions of two steps, two questions of one picture.

The kinds of `scene_questions` are among them, so that tables of the two pocket models share rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from random import Random

from PIL import Image

from sinkprune.contract.text.questions import Question
from sinkprune.demo.scene_questions import APART, KINDS, Draft, QuestionMaker, all_by, ask, named
from sinkprune.demo.scenes import Scene, SceneObject
from sinkprune.demo.varied_scenes import TEST_PICTURES, make_varied

_DIRECTIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Steps along x and y."""


def varied_test_set() -> Iterator[tuple[Image.Image, Question]]:
    """Yield the fixed test set: questions of every kind about each of its pictures, picture by picture."""
    return varied_questions_about("test", TEST_PICTURES)


def varied_questions_about(split: str, count: int) -> Iterator[tuple[Image.Image, Question]]:
    """Yield questions of every kind about the first `count` pictures of `split` (training, validation, test)."""
    for index in range(count):
        (scene, picture), rng = make_varied(split, index), Random(f"varied {split} questions {index}")
        for kind, make in VARIED_KINDS.items():
            for question in ask(make, scene, rng, kind, f"varied-{index:03d}-{kind}"):
                yield picture, question


def _small_text(scene: Scene, rng: Random) -> Draft:
    return _read(rng.choice(scene.labels))


def _read(thing: SceneObject) -> Draft:
    return Draft(f"What is written on the {named(thing.pair)}?", thing.text)


def _read_by_colour(scene: Scene, rng: Random) -> Draft | None:
    """Ask for the text of the plate or label that has an object's colour: find the object, then the text."""
    framed = (*all_by(scene.plates, lambda t: t.colour), *all_by(scene.labels, lambda t: t.colour))
    steps = [
        (thing, frame)
        for thing in all_by(scene.objects, lambda t: t.shape)
        for frame in framed
        if frame.colour == thing.colour
    ]
    if not steps:
        return None
    thing, frame = rng.choice(steps)
    return Draft(f"What is written on the {frame.shape} of the same colour as the {thing.shape}?", frame.text)


def _shape_by_colour(scene: Scene, rng: Random) -> Draft | None:
    """Ask for the shape of the only other object of an object's colour: find the object, then the other."""
    colours = Counter(thing.colour for thing in scene.objects)
    steps = [
        (thing, other)
        for thing in all_by(scene.objects, lambda t: t.shape)
        for other in scene.objects
        if other is not thing and other.colour == thing.colour and colours[thing.colour] == 2
    ]
    if not steps:
        return None
    thing, other = rng.choice(steps)
    return Draft(f"Which shape has the same colour as the {thing.shape}?", other.shape)


def _colour_by_place(scene: Scene, rng: Random) -> Draft | None:
    """Ask for the colour of the only object on one side of another: find the one, then look beside it."""
    steps = []
    for thing in all_by(scene.objects, lambda t: t.pair):
        for direction, (right, down) in _DIRECTIONS.items():
            ahead = [right * (t.x - thing.x) + down * (t.y - thing.y) for t in scene.objects]
            beyond = [t for t, distance in zip(scene.objects, ahead, strict=True) if distance > 0]
            if len(beyond) == 1 and max(ahead) >= APART:
                steps.append((thing, direction, beyond[0]))
    if not steps:
        return None
    thing, direction, other = rng.choice(steps)
    return Draft(f"What colour is the object {direction} the {named(thing.pair)}?", other.colour)


def _one_of_two(number: int) -> QuestionMaker:
    """Ask about thing `number` of two things of a scene, which are the same two for 0 and 1."""

    def ask_about(scene: Scene, rng: Random) -> Draft | None:
        by_shape, by_colour = (all_by(scene.objects, attrgetter(name)) for name in ("shape", "colour"))
        drafts = [(t, Draft(f"What colour is the {t.shape}?", t.colour)) for t in by_shape]
        drafts += [(t, Draft(f"What shape is the {t.colour} object?", t.shape)) for t in by_colour]
        drafts += [(t, _read(t)) for t in (*scene.plates, *scene.labels)]
        # Both questions must come from the same order, whatever was drawn between them.
        Random(repr(scene)).shuffle(drafts)
        things = list(dict.fromkeys(thing for thing, _ in drafts))
        return next(draft for thing, draft in drafts if thing == things[number]) if len(things) > 1 else None

    return ask_about


VARIED_KINDS: dict[str, QuestionMaker] = {
    **KINDS,
    "small-text": _small_text,
    "two-step-reading": _read_by_colour,
    "two-step-shape": _shape_by_colour,
    "two-step-place": _colour_by_place,
    "first-of-two": _one_of_two(0),
    "second-of-two": _one_of_two(1),
}
"""The kinds of questions by name. The last two ask about different things of one picture."""
