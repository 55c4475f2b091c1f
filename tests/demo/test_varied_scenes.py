"""Varied scenes have several resolutions, text that a smaller picture loses, and questions with one right answer."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from pocket_training.lessons import draw_questions
from sinkprune.calibration.tasks import VARIED_SCENES, load_task
from sinkprune.contract.questions import Question
from sinkprune.demo.questions import KINDS, VARIED_KINDS, varied_questions_about, varied_test_set
from sinkprune.demo.scenes import MOST_TOKENS, SIZES, UNIT, Scene, SceneObject, compose_varied, make_varied
from sinkprune.demo.write_scenes import write_scenes

TEST = list(varied_test_set())
SCENES = [compose_varied("validation", index) for index in range(150)]
OWN = [kind for kind in VARIED_KINDS if kind not in KINDS]


def test_the_test_set_is_fixed() -> None:
    asked = "\n".join(f"{q.id} {picture.size} {q.prompt} {q.answers}" for picture, q in TEST)
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "c244efc459eadf3c"
    kinds = Counter(question.kind for _, question in TEST)
    assert set(kinds) == set(VARIED_KINDS) and min(kinds.values()) >= 20
    assert len({question.id for _, question in TEST}) == len(TEST) >= 800


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


@pytest.mark.parametrize("index", range(0, 150, 3))
def test_answers_are_right(index: int) -> None:
    scene, kinds = SCENES[index], [kind for kind in OWN if not kind.endswith("-of-two")]
    for question in draw_questions(scene, Random(index), 30, kinds, VARIED_KINDS):
        assert question.answers == (right_answer(scene, question),), question


def right_answer(scene: Scene, question: Question) -> str:
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
    for kind in OWN:
        replies = Counter(question.answers[0] for _, question in TEST if question.kind == kind)
        assert max(replies.values()) <= 0.4 * sum(replies.values()), kind
    pictures = [id(picture) for picture, _ in TEST]
    assert sum(a != b for a, b in pairwise(pictures)) == len(set(pictures)) - 1


def test_the_evaluator_and_the_program_that_writes_scenes_have_them(tmp_path: Path) -> None:
    items = load_task(VARIED_SCENES)
    assert [item.question for item in items] == [question for _, question in TEST]
    assert len({item.picture for item in items}) == 60
    for item, (picture, _) in zip(items[::40], TEST[::40], strict=True):
        assert item.load_image().tobytes() == picture.tobytes()
    write_scenes(tmp_path, 2, "validation", VARIED_SCENES)
    written = load_task(str(tmp_path / "scenes.jsonl"))
    expected = list(varied_questions_about("validation", 2))
    assert [item.question for item in written] == [question for _, question in expected]
    assert_same_pictures([item.load_image() for item in written], [picture for picture, _ in expected])


def assert_same_pictures(pictures: Sequence[Image.Image], expected: Sequence[Image.Image]) -> None:
    for a, b in zip(pictures, expected, strict=True):
        assert (a.size, a.tobytes()) == (b.size, b.tobytes())
