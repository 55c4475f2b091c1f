"""Tasks from JSONL files: what a line may say, and how a bad one is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sinkprune.calibration.questions import seen_shares, task_pictures
from sinkprune.calibration.tasks import TASK_BYTES, items_by_picture, load_task, with_grey_picture
from sinkprune.contract.errors import TaskError

GOOD = {"image": "red.png", "question": "Is it red?", "answer": "yes"}
CHOICE = {"image": "red.png", "question": "Which colour?", "options": ["red", "blue", "green"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a picture, an empty file, a text and half a picture."""
    Image.new("RGB", (40, 30), (200, 0, 0)).save(tmp_path / "red.png")
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "half.png").write_bytes((tmp_path / "red.png").read_bytes()[:60])
    return tmp_path


def write(folder: Path, *lines: Any) -> str:
    path = folder / "task.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def test_lines_become_questions(folder: Path) -> None:
    more = {**GOOD, "answer": ["yes", "yeah"], "kind": "colour", "id": "second"}
    first, second, third = load_task(write(folder, GOOD, more, b"", {**CHOICE, "answer": "blue", "id": 7}))
    assert (first.question.id, first.question.kind, first.question.prompt) == ("1", "unnamed", "Is it red?")
    assert first.question.answers == ("yes",)
    assert (second.question.id, second.question.kind) == ("second", "colour")
    assert second.question.is_right(" Yeah.")
    assert third.question.id == "7"
    assert third.question.prompt.splitlines()[:4] == ["Which colour?", "A. red", "B. blue", "C. green"]
    assert third.question.is_right("B")
    assert third.question.is_right("Blue.")
    assert not third.question.is_right("red")
    assert third.load_image().getpixel((0, 0)) == (200, 0, 0)


def test_a_line_without_an_id_has_its_number_blank_lines_counted(folder: Path) -> None:
    assert [item.question.id for item in load_task(write(folder, b"  ", GOOD, b"", GOOD))] == ["2", "4"]


@pytest.mark.parametrize(("answer", "letter"), [("C", "C"), ("green", "C"), (2, "C"), (0, "A"), ("A", "A")])
def test_a_choice_is_named_by_letter_text_or_number(folder: Path, answer: Any, letter: str) -> None:
    (item,) = load_task(write(folder, {**CHOICE, "answer": answer}))
    assert item.question.answers == (letter,)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"image": "red.png",', "bad JSON"),
        (b"[" * 100_000, "bad JSON"),
        (b"[1]", "found [1], expected an object"),
        ({**GOOD, "colour": 1}, "unknown field 'colour'"),
        ({"image": "red.png", "answer": "yes"}, "missing field 'question'"),
        ({**GOOD, "image": "gone.png"}, "no such file"),
        ({**GOOD, "image": "half.png"}, "damaged or truncated"),
        ({**GOOD, "question": "\ud83d"}, "half of a surrogate pair"),
        ({**GOOD, "id": True}, "$.id: found True"),
        ({**GOOD, "id": "1"}, "line 1 too"),
        ({**GOOD, "answer": ["yes", ""]}, "'answer' is ''"),
        ({**GOOD, "answer": "?!"}, "nothing but punctuation"),
        ({**CHOICE, "answer": "D"}, "A to C"),
        ({**CHOICE, "answer": -1}, "0 to 2"),
        ({**CHOICE, "answer": True}, "found True"),
        ({**CHOICE, "answer": 1.0}, "found 1.0"),
        ({**CHOICE, "options": ["B", "A"], "answer": "A"}, "letter of one option and the text of another"),
        ({**CHOICE, "options": ["red"], "answer": 0}, "2 to 26"),
        ({**CHOICE, "options": ["red", "red"], "answer": 0}, "two are the same"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(folder: Path, line: Any, said: str) -> None:
    path = write(folder, GOOD, b"", line, GOOD)
    with pytest.raises(TaskError) as refused:
        load_task(path)
    assert str(refused.value).startswith(f"'{path}', line 3: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_no_task_are_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match="is empty"):
        load_task(write(folder, b"", b" "))
    with pytest.raises(TaskError, match="is missing"):
        load_task(str(folder / "gone.jsonl"))
    with pytest.raises(TaskError, match="is a folder"):
        (folder / "folder.jsonl").mkdir()
        load_task(str(folder / "folder.jsonl"))
    with pytest.raises(TaskError, match=r"'pope' is no test set.*scenes"):
        load_task("pope")
    with pytest.raises(TaskError, match=r"'nosuch/' is no test set, and there is no such file or folder\. Give"):
        load_task("nosuch/")
    # A file that is there, of another kind.
    with pytest.raises(TaskError, match=r"no\.txt' is no test set\. Give"):
        (folder / "no.txt").touch()
        load_task(str(folder / "no.txt"))


def test_questions_are_grouped_by_picture_in_any_order(folder: Path) -> None:
    Image.new("RGB", (20, 30), (0, 0, 200)).save(folder / "blue.png")
    blue = {**GOOD, "image": "blue.png"}
    items = load_task(write(folder, GOOD, blue, GOOD, blue, blue))
    groups = items_by_picture(items)
    assert [[item.id for item in group] for group in groups] == [["1", "3"], ["2", "4", "5"]]
    assert [Path(picture.name).name for picture in task_pictures(str(folder / "task.jsonl"))] == [
        "red.png",
        "blue.png",
    ]
    sizes = [tuple(item.facts.size) for item in items]
    family: Any = SimpleNamespace(layout=lambda image: SimpleNamespace(seen_share=image.width / 100))
    assert seen_shares(family, items) == [width / 100 for width, _ in sizes]


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_first_line(folder: Path) -> None:
    line = json.dumps(GOOD).encode()
    assert len(load_task(write(folder, b"\xef\xbb\xbf" + line + b"\r", line + b"\r", b"\r"))) == 2


def test_a_blinded_item_shows_grey_of_the_same_size(folder: Path) -> None:
    (item,) = load_task(write(folder, GOOD))
    grey = with_grey_picture(item)
    assert grey.question is item.question
    assert grey.load_image().size == (40, 30)
    assert grey.load_image().getcolors() == [(1200, (128, 128, 128))]


@pytest.mark.parametrize(("name", "width"), [("scenes", 224), ("wide-scenes", 398)])
def test_scenes_are_the_test_set_picture_by_picture(name: str, width: int) -> None:
    from sinkprune.demo.questions import test_set

    drawn = dict(enumerate(zip(test_set(width), load_task(name, limit=12), strict=False)))
    assert len(drawn) == 12
    for (picture, question), item in drawn.values():
        assert item.question == question
        assert item.load_image().tobytes() == picture.convert("RGB").tobytes()
        assert item.load_image().size == (width, 224)


def test_what_is_no_regular_file_or_too_large_is_no_task(folder: Path) -> None:
    os.mkfifo(folder / "fifo.jsonl")
    with pytest.raises(TaskError, match=r"fifo\.jsonl' is a FIFO, expected a regular file"):
        load_task(str(folder / "fifo.jsonl"))
    os.mkfifo(folder / "fifo.png")
    with pytest.raises(TaskError, match=r"line 1: image '.*fifo\.png' is a FIFO"):
        load_task(write(folder, {**GOOD, "image": "fifo.png"}))
    path = write(folder, GOOD)
    os.truncate(path, TASK_BYTES + 1)
    with pytest.raises(TaskError, match=f"has {TASK_BYTES + 1} bytes, expected at most {TASK_BYTES}"):
        load_task(path)
