"""Questions about scenes.

Existence is like POPE, with absent pairs that are random, popular, or adversarial (colour and shape are both present,
on different objects). Colour, shape, size and relation are like GQA, reading like TextVQA, and multiple choice like
MMBench. Varied scenes have these kinds too, so that tables of the two pocket models share rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from operator import attrgetter
from random import Random

from PIL import Image

from sinkprune.contract.questions import Question
from sinkprune.demo.scenes import (
    COLOURS,
    DIGITS,
    POPULAR,
    RADII,
    SHAPES,
    SIDE,
    TEST_PICTURES,
    VARIED_TEST_PICTURES,
    WORDS,
    Scene,
    SceneObject,
    compose_scene,
    make_scene,
    make_varied,
)

APART = 30
"""The least distance in pixels of objects in questions about left, right, above or below."""


@dataclass(frozen=True)
class Draft:
    """A question that has no id yet."""

    text: str
    answer: str
    options: tuple[str, ...] = ()


Pair = tuple[str, str]
"""Colour and shape of an object."""
QuestionMaker = Callable[[Scene, Random], Draft | None]
"""Returns a question about a scene, or None if the scene allows none of this kind."""


def test_set(width: int = SIDE) -> Iterator[tuple[Image.Image, Question]]:
    """Yield the fixed test set: questions of every kind about each of its pictures, picture by picture.

    The questions are the same for pictures of any `width` in pixels (`make_scene`).
    """
    return questions_about("test", TEST_PICTURES, width)


def questions_about(split: str, count: int, width: int = SIDE) -> Iterator[tuple[Image.Image, Question]]:
    """Yield questions of every kind about the first `count` pictures of `split` (training, validation, test)."""
    for index in range(count):
        scene, (_, picture) = compose_scene(split, index), make_scene(split, index, width)
        for question in one_of_each_kind(scene, Random(f"{split} questions {index}"), f"scene-{index:03d}"):
            yield picture, question


def one_of_each_kind(scene: Scene, rng: Random, name: str) -> Iterator[Question]:
    """Yield a question of every kind that the scene allows; their ids start with `name`."""
    for kind, make in KINDS.items():
        yield from ask(make, scene, rng, kind, f"{name}-{kind}")


def plural(thing: str) -> str:
    """Return the plural of a shape."""
    return f"{thing}es" if thing == "cross" else f"{thing}s"


def ask(make: QuestionMaker, scene: Scene, rng: Random, kind: str, name: str) -> Iterator[Question]:
    """Yield the question of `make` with `name` as its id, if the scene allows one."""
    asked = make(scene, rng)
    if asked is not None:
        listed = () if asked.options else next((group for group in _CLOSED_LISTS if asked.answer in group), ())
        yield Question(name, kind, asked.text, (asked.answer,), asked.options, listed)


def _existence(absent: Callable[[Scene], Sequence[Pair]]) -> QuestionMaker:
    """Ask for a pair that is present, or as often for one of `absent`."""

    def ask_for_one(scene: Scene, rng: Random) -> Draft | None:
        present = sorted({thing.pair for thing in scene.objects})
        there = rng.random() < 0.5
        pairs = present if there else [pair for pair in absent(scene) if pair not in present]
        if not pairs:
            return None
        return Draft(f"Is there {_a(rng.choice(pairs))}?", "yes" if there else "no")

    return ask_for_one


def _mixed_pairs(scene: Scene) -> list[Pair]:
    return list(product(sorted({t.colour for t in scene.objects}), sorted({t.shape for t in scene.objects})))


def _about_one(key: Callable[[SceneObject], object], ask: Callable[[SceneObject], Draft]) -> QuestionMaker:
    """Ask about an object that shares its `key` with no other."""

    def ask_about_one(scene: Scene, rng: Random) -> Draft | None:
        unique = all_by(scene.objects, key)
        return ask(rng.choice(unique)) if unique else None

    return ask_about_one


def _size(thing: SceneObject) -> Draft:
    return Draft(f"Is the {named(thing.pair)} {' or '.join(RADII)}?", thing.size)


_colour = _about_one(lambda t: t.shape, lambda t: Draft(f"What colour is the {t.shape}?", t.colour))
_shape = _about_one(lambda t: t.colour, lambda t: Draft(f"What shape is the {t.colour} object?", t.shape))


def _relation(scene: Scene, rng: Random) -> Draft | None:
    unique = all_by(scene.objects, lambda thing: thing.pair)
    relations = []
    for a, b in permutations(unique, 2):
        if abs(a.x - b.x) >= APART:
            relations.append((a, b, "left or right of", "left" if a.x < b.x else "right"))
        if abs(a.y - b.y) >= APART:
            relations.append((a, b, "above or below", "above" if a.y < b.y else "below"))
    if not relations:
        return None
    a, b, either, answer = rng.choice(relations)
    return Draft(f"Is the {named(a.pair)} {either} the {named(b.pair)}?", answer)


def _counting(scene: Scene, rng: Random) -> Draft | None:
    counts = Counter(f"{thing.colour} object" for thing in scene.objects)
    counts.update(thing.shape for thing in scene.objects)
    # Prefer large numbers, which are rare in scenes; otherwise nearly all answers would be 1.
    numbers = sorted(set(counts.values()))
    number = rng.choices(numbers, weights=numbers)[0]
    what = rng.choice(sorted(what for what in counts if counts[what] == number))
    return Draft(f"How many {plural(what)} are there?", str(number))


def _reading(scene: Scene, rng: Random) -> Draft | None:
    plate = rng.choice(scene.plates)
    return Draft(f"What is written on the {plate.colour} plate?", plate.text)


def _choice(scene: Scene, rng: Random) -> Draft | None:
    """Ask for a colour, a shape, a text or an object, with four options."""
    asked = rng.choice([_colour, _shape, _reading, _present])(scene, rng)
    if asked is None:
        return None
    alike = next(group for group in _ALTERNATIVES if asked.answer in group)
    absent = [text for text in alike if text != asked.answer]
    if asked.text == _WHICH:
        held = {named(thing.pair) for thing in scene.objects}
        absent = [text for text in absent if text not in held]
    options = [asked.answer, *rng.sample(absent, 3)]
    rng.shuffle(options)
    return Draft(asked.text, "ABCD"[options.index(asked.answer)], tuple(options))


_WHICH = "Which of these is in the picture?"


def _present(scene: Scene, rng: Random) -> Draft | None:
    return Draft(_WHICH, named(rng.choice(scene.objects).pair))


def named(pair: Pair) -> str:
    """Return the words for an object."""
    return " ".join(pair)


def _a(pair: Pair) -> str:
    return f"{'an' if pair[0][0] in 'aeiou' else 'a'} {named(pair)}"


def all_by(things: Sequence[SceneObject], key: Callable[[SceneObject], object]) -> list[SceneObject]:
    """Return the things that share their `key` with no other."""
    counts = Counter(map(key, things))
    return [thing for thing in things if counts[key(thing)] == 1]


_PAIRS = tuple(product(COLOURS, SHAPES))
_ALTERNATIVES = (tuple(COLOURS), SHAPES, DIGITS, WORDS, tuple(map(named, _PAIRS)))

_CLOSED_LISTS = (("yes", "no"), tuple(RADII), ("left", "right"), ("above", "below"), *_ALTERNATIVES)
"""Each answer is in one at most."""

KINDS: dict[str, QuestionMaker] = {
    "existence-random": _existence(lambda scene: _PAIRS),
    "existence-popular": _existence(lambda scene: POPULAR),
    "existence-adversarial": _existence(_mixed_pairs),
    "colour": _colour,
    "shape": _shape,
    "size": _about_one(lambda thing: thing.pair, _size),
    "relation": _relation,
    "counting": _counting,
    "reading": _reading,
    "choice": _choice,
}
"""The kinds of questions by name."""


_DIRECTIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Steps along x and y."""


def varied_test_set() -> Iterator[tuple[Image.Image, Question]]:
    """Yield the fixed test set: questions of every kind about each of its pictures, picture by picture."""
    return varied_questions_about("test", VARIED_TEST_PICTURES)


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
