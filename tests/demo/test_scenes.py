"""Scenes are what they say they are, and their questions have one right answer, which is no good guess."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

from PIL import Image

from pocket_training.lessons import draw_questions
from sinkprune.calibration.tasks import VARIED_SCENES, load_task
from sinkprune.contract.questions import Question
from sinkprune.demo import questions as scene_questions
from sinkprune.demo.questions import KINDS, VARIED_KINDS, varied_questions_about, varied_test_set
from sinkprune.demo.scenes import (
    COLOURS,
    MOST_TOKENS,
    SIDE,
    SIZES,
    UNIT,
    WIDE,
    Scene,
    SceneObject,
    compose_scene,
    compose_varied,
    make_scene,
    make_varied,
)
from sinkprune.demo.write_scenes import write_scenes

TEST, VARIED_TEST = list(scene_questions.test_set()), list(varied_test_set())
SCENES = [compose_scene("validation", index) for index in range(150)]
VARIED = [compose_varied("validation", index) for index in range(150)]
OWN = [kind for kind in VARIED_KINDS if kind not in KINDS]


def test_the_test_sets_are_fixed() -> None:
    asked = "\n".join(f"{q.id} {q.prompt} {q.answers}" for _, q in TEST)
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "7ded02a40befb218"
    assert [question for _, question in scene_questions.test_set(WIDE)] == [question for _, question in TEST]
    asked = "\n".join(f"{q.id} {picture.size} {q.prompt} {q.answers}" for picture, q in VARIED_TEST)
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "c244efc459eadf3c"
    for test, expected, each, least in ((TEST, KINDS, 60, 600), (VARIED_TEST, VARIED_KINDS, 20, 800)):
        kinds = Counter(question.kind for _, question in test)
        assert set(kinds) == set(expected) and min(kinds.values()) >= each
        assert len({question.id for _, question in test}) == len(test) >= least


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


def one(things: object) -> SceneObject:
    (thing,) = things  # type: ignore[misc]
    return thing


def test_pictures_have_every_size_in_whole_visual_tokens() -> None:
    drawn = [make_varied("validation", index) for index in range(150)]
    assert {picture.size for _, picture in drawn} == set(SIZES)
    for scene, picture in drawn:
        assert picture.size == scene.size
        tokens = [side / UNIT for side in picture.size]
        assert all(count.is_integer() for count in tokens)
        assert 64 <= tokens[0] * tokens[1] <= MOST_TOKENS


def test_answers_are_right() -> None:
    kinds = [kind for kind in OWN if not kind.endswith("-of-two")]
    for index in range(0, 150, 3):
        for question in draw_questions(SCENES[index], Random(index), 40, list(KINDS)):
            assert question.answers == (right_answer(SCENES[index], question),), question
        for question in draw_questions(VARIED[index], Random(index), 30, kinds, VARIED_KINDS):
            assert question.answers == (right_varied_answer(VARIED[index], question),), question


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


def right_varied_answer(scene: Scene, question: Question) -> str:
    """The answer, from the words of the question alone."""
    text = question.text
    if match := re.fullmatch(r"What is written on the (\w+) label\?", text):
        return one(t for t in scene.labels if t.colour == match[1]).text
    if match := re.fullmatch(r"What is written on the (plate|label) of the same colour as the (\w+)\?", text):
        colour = one(t for t in scene.objects if t.shape == match[2]).colour
        return one(t for t in scene.things if (t.shape, t.colour) == (match[1], colour)).text
    if match := re.fullmatch(r"Which shape has the same colour as the (\w+)\?", text):
        colour = one(t for t in scene.objects if t.shape == match[1]).colour
        return one(t for t in scene.objects if t.colour == colour and t.shape != match[1]).shape
    match = re.fullmatch(r"What colour is the object (left of|right of|above|below) the (\w+) (\w+)\?", text)
    assert match, text
    at = one(t for t in scene.objects if t.pair == (match[2], match[3]))
    beyond = {"left of": lambda t: t.x < at.x, "right of": lambda t: t.x > at.x}
    beyond |= {"above": lambda t: t.y < at.y, "below": lambda t: t.y > at.y}
    other = one(filter(beyond[match[1]], scene.objects))
    assert max(abs(other.x - at.x), abs(other.y - at.y)) >= 30
    return other.colour


def test_no_answer_is_a_good_guess() -> None:
    most = dict.fromkeys(KINDS, 0.6) | {kind: 0.62 for kind in KINDS if kind.startswith("existence")}
    for test, shares in ((TEST, most), (VARIED_TEST, dict.fromkeys(OWN, 0.4))):
        for kind, share in shares.items():
            replies = Counter(question.answers[0] for _, question in test if question.kind == kind)
            assert max(replies.values()) <= share * sum(replies.values()), kind
        # The questions about a picture follow each other.
        pictures = [id(picture) for picture, _ in test]
        assert sum(a != b for a, b in pairwise(pictures)) == len(set(pictures)) - 1


def test_the_evaluator_and_the_program_that_writes_scenes_have_them(tmp_path: Path) -> None:
    items = load_task(VARIED_SCENES)
    assert [item.question for item in items] == [question for _, question in VARIED_TEST]
    assert len({item.picture for item in items}) == 60
    for item, (picture, _) in zip(items[::40], VARIED_TEST[::40], strict=True):
        assert item.load_image().tobytes() == picture.tobytes()
    write_scenes(tmp_path, 2, "validation", VARIED_SCENES)
    written = load_task(str(tmp_path / "scenes.jsonl"))
    expected = list(varied_questions_about("validation", 2))
    assert [item.question for item in written] == [question for _, question in expected]
    assert_same_pictures([item.load_image() for item in written], [picture for picture, _ in expected])


def assert_same_pictures(pictures: Sequence[Image.Image], expected: Sequence[Image.Image]) -> None:
    for a, b in zip(pictures, expected, strict=True):
        assert (a.size, a.tobytes()) == (b.size, b.tobytes())
