"""Scenes are what they say they are, and the answers to their questions are right."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from pocket_training.lessons import draw_questions
from sinkprune.contract.questions import Question
from sinkprune.demo import questions as scene_questions
from sinkprune.demo.questions import KINDS
from sinkprune.demo.scenes import COLOURS, SIDE, WIDE, Scene, compose_scene, make_scene

TEST = list(scene_questions.test_set())
SCENES = [compose_scene("validation", index) for index in range(150)]


def test_the_test_set_is_fixed() -> None:
    asked = "\n".join(f"{q.id} {q.prompt} {q.answers}" for _, q in TEST)
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "7ded02a40befb218"
    kinds = Counter(question.kind for _, question in TEST)
    assert set(kinds) == set(KINDS) and min(kinds.values()) >= 60
    assert len({question.id for _, question in TEST}) == len(TEST) >= 600
    assert [question for _, question in scene_questions.test_set(WIDE)] == [question for _, question in TEST]


def test_wide_pictures_hold_the_same_things_further_apart() -> None:
    for index in range(20):
        (narrow, picture), (wide, broad) = (make_scene("test", index, width) for width in (SIDE, WIDE))
        assert (picture.size, broad.size) == ((224, 224), (398, 224))
        for before, after in zip((*narrow.objects, *narrow.plates), (*wide.objects, *wide.plates), strict=True):
            assert after == replace(before, x=after.x)
            assert abs(after.x - before.x * 398 / 224) <= 3.5
            # The middle square of the picture is one that the model could have been trained on.
            assert (after.x - 87) % 7 == before.y % 7 == 0
            assert after.half_width <= after.x <= 398 - after.half_width
            if before.shape == "square":
                colours = [image.getpixel((thing.x, thing.y)) for image, thing in ((picture, before), (broad, after))]
                assert colours[0] == colours[1] == COLOURS[before.colour]


def test_things_do_not_overlap_and_lie_within_the_picture() -> None:
    for scene in SCENES:
        things = [*scene.objects, *scene.plates]
        for i, a in enumerate(things):
            assert a.half_width <= a.x <= SIDE - a.half_width
            assert a.half_height <= a.y <= SIDE - a.half_height
            for b in things[:i]:
                apart_x = abs(a.x - b.x) > a.half_width + b.half_width
                assert apart_x or abs(a.y - b.y) > a.half_height + b.half_height


@pytest.mark.parametrize("index", range(0, 150, 3))
def test_answers_are_right(index: int) -> None:
    scene = SCENES[index]
    for question in draw_questions(scene, Random(index), 40, list(KINDS)):
        assert question.answers == (right_answer(scene, question),), question


def right_answer(scene: Scene, question: Question) -> str:
    """The answer, from the words of the question alone."""
    if question.options:
        plain = Question("", "", question.text, ("",))
        if question.text.startswith("Which"):
            held = [" ".join(thing.pair) for thing in scene.objects]
            (right,) = [option for option in question.options if option in held]
        else:
            right = right_answer(scene, plain)
        return "ABCD"[question.options.index(right)]
    words = question.text.rstrip("?").split()
    objects = scene.objects
    if question.text.startswith("Is there"):
        return "yes" if tuple(words[3:5]) in [thing.pair for thing in objects] else "no"
    if question.text.startswith("What colour"):
        (thing,) = [thing for thing in objects if thing.shape == words[4]]
        return thing.colour
    if question.text.startswith("What shape"):
        (thing,) = [thing for thing in objects if thing.colour == words[4]]
        return thing.shape
    if question.text.startswith("What is written"):
        (plate,) = [plate for plate in scene.plates if plate.colour == words[5]]
        return plate.text
    if question.text.startswith("How many"):
        if words[3].startswith("object"):
            return str(sum(thing.colour == words[2] for thing in objects))
        return str(sum(words[2] in (f"{thing.shape}s", f"{thing.shape}es") for thing in objects))
    (first,) = [thing for thing in objects if thing.pair == tuple(words[2:4])]
    if question.text.endswith("small or large?"):
        return first.size
    (second,) = [thing for thing in objects if thing.pair == tuple(words[-2:])]
    if words[4] == "left":
        return "left" if first.x < second.x else "right"
    return "above" if first.y < second.y else "below"


def test_no_answer_is_a_good_guess() -> None:
    for kind in KINDS:
        replies = Counter(question.answers[0] for _, question in TEST if question.kind == kind)
        assert max(replies.values()) <= (0.62 if kind.startswith("existence") else 0.6) * sum(replies.values()), kind
    pictures = [id(picture) for picture, _ in TEST]
    assert sum(a != b for a, b in pairwise(pictures)) == len(set(pictures)) - 1
