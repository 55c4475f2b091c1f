"""Scenes are what they say they are, and no answer to their questions is a good guess."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from sinkprune.calibration.tasks import VARIED_SCENES, load_task
from sinkprune.contract.questions import Question
from sinkprune.demo import questions as scene_questions
from sinkprune.demo.questions import KINDS, VARIED_KINDS, varied_test_set
from sinkprune.demo.scenes import COLOURS, MOST_TOKENS, SIDE, SIZES, UNIT, WIDE, make_scene, make_varied
from sinkprune.demo.write_scenes import write_scenes

TEST, VARIED_TEST = list(scene_questions.test_set()), list(varied_test_set())
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
    for scene, _ in (make_scene("validation", index) for index in range(150)):
        things = [*scene.objects, *scene.plates]
        for i, a in enumerate(things):
            assert a.half_width <= a.x <= SIDE - a.half_width
            assert a.half_height <= a.y <= SIDE - a.half_height
            for b in things[:i]:
                apart_x = abs(a.x - b.x) > a.half_width + b.half_width
                assert apart_x or abs(a.y - b.y) > a.half_height + b.half_height


def test_pictures_have_every_size_in_whole_visual_tokens() -> None:
    drawn = [make_varied("validation", index) for index in range(150)]
    assert {picture.size for _, picture in drawn} == set(SIZES)
    for scene, picture in drawn:
        assert picture.size == scene.size
        tokens = [side / UNIT for side in picture.size]
        assert all(count.is_integer() for count in tokens)
        assert 64 <= tokens[0] * tokens[1] <= MOST_TOKENS


def test_no_answer_is_a_good_guess() -> None:
    most = dict.fromkeys(KINDS, 0.6) | {kind: 0.62 for kind in KINDS if kind.startswith("existence")}
    for test, shares in ((TEST, most), (VARIED_TEST, dict.fromkeys(OWN, 0.4))):
        for kind, share in shares.items():
            replies = Counter(question.answers[0] for _, question in test if question.kind == kind)
            assert max(replies.values()) <= share * sum(replies.values()), kind
        # The questions about a picture follow each other.
        pictures = [id(picture) for picture, _ in test]
        assert sum(a != b for a, b in pairwise(pictures)) == len(set(pictures)) - 1


@pytest.mark.parametrize(("task", "test"), [("scenes", TEST), (VARIED_SCENES, VARIED_TEST)])
def test_the_evaluator_and_the_program_that_writes_scenes_have_them(
    task: str, test: list[tuple[Image.Image, Question]], tmp_path: Path
) -> None:
    items = load_task(task)
    assert [item.question for item in items] == [question for _, question in test]
    write_scenes(tmp_path, 2, "test", task)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scene-0.png", "scene-1.png", "scenes.jsonl"]
    written = load_task(str(tmp_path / "scenes.jsonl"))
    assert [item.question for item in written] == [item.question for item in items[: len(written)]]
    for item, own, (picture, _) in zip(written, items, test, strict=False):
        assert item.load_image().tobytes() == own.load_image().tobytes() == picture.tobytes()
