"""Tasks from JSONL files, questions and moments: what a line may have, and how a bad one is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sinkprune.calibration.questions import seen_shares, task_pictures
from sinkprune.calibration.tasks import (
    TASK_BYTES,
    Moment,
    items_by_picture,
    load_moments,
    load_task,
    with_grey_picture,
)
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import TaskError
from sinkprune.contract.manifest import Manifest
from support.models.manifests import name_cameras

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
    grey = with_grey_picture(third)
    assert grey.question is third.question
    assert (grey.load_image().size, grey.load_image().getcolors()) == ((40, 30), [(1200, (128, 128, 128))])
    # A line without an id has its number, blank lines counted.
    assert [item.question.id for item in load_task(write(folder, b"  ", GOOD, b"", GOOD))] == ["2", "4"]
    # A byte order mark and Windows' ends of lines are no part of a line.
    line = json.dumps(GOOD).encode()
    assert len(load_task(write(folder, b"\xef\xbb\xbf" + line + b"\r", line + b"\r", b"\r"))) == 2
    for answer, letter in (("C", "C"), ("green", "C"), (2, "C"), (0, "A"), ("A", "A")):
        assert load_task(write(folder, {**CHOICE, "answer": answer}))[0].question.answers == (letter,)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"image": "red.png",', "bad JSON"),
        (b"[" * 100_000, "bad JSON"),
        ({**GOOD, "colour": 1}, "unknown field 'colour'"),
        ({**GOOD, "image": "gone.png"}, "no such file"),
        ({**GOOD, "image": "half.png"}, "damaged or truncated"),
        ({**GOOD, "question": "\ud83d"}, "half of a surrogate pair"),
        ({**GOOD, "id": True}, "$.id: found True"),
        ({**GOOD, "id": "1"}, "line 1 too"),
        ({**GOOD, "answer": ["yes", ""]}, "'answer' is ''"),
        ({**GOOD, "answer": "?!"}, "nothing but punctuation"),
        ({**CHOICE, "answer": "D"}, "A to C"),
        ({**CHOICE, "answer": True}, "found True"),
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
    (folder / "no.txt").touch()
    os.mkfifo(folder / "fifo.jsonl")
    os.mkfifo(folder / "fifo.png")
    for name, said in (
        (str(folder / "gone.jsonl"), "is missing"),
        ("pope", "'pope' is no test set.*scenes"),
        (str(folder / "no.txt"), r"no\.txt' is no test set\. Give"),
        (str(folder / "fifo.jsonl"), r"fifo\.jsonl' is a FIFO, expected a regular file"),
        (write(folder, {**GOOD, "image": "fifo.png"}), r"line 1: image '.*fifo\.png' is a FIFO"),
    ):
        with pytest.raises(TaskError, match=said):
            load_task(name)
    with pytest.raises(TaskError, match="is empty"):
        load_task(write(folder, b"", b" "))
    path = write(folder, GOOD)
    os.truncate(path, TASK_BYTES + 1)
    with pytest.raises(TaskError, match=f"has {TASK_BYTES + 1} bytes, expected at most {TASK_BYTES}"):
        load_task(path)


def test_questions_are_grouped_by_picture_in_any_order(folder: Path) -> None:
    Image.new("RGB", (20, 30), (0, 0, 200)).save(folder / "blue.png")
    blue = {**GOOD, "image": "blue.png"}
    items = load_task(write(folder, GOOD, blue, GOOD, blue, blue))
    groups = items_by_picture(items)
    assert [[item.id for item in group] for group in groups] == [["1", "3"], ["2", "4", "5"]]
    pictures = task_pictures(str(folder / "task.jsonl"))
    assert [Path(picture.name).name for picture in pictures] == ["red.png", "blue.png"]
    sizes = [tuple(item.facts.size) for item in items]
    family: Any = SimpleNamespace(layout=lambda image: SimpleNamespace(seen_share=image.width / 100))
    assert seen_shares(family, items) == [width / 100 for width, _ in sizes]


@pytest.mark.parametrize(("name", "width"), [("scenes", 224), ("wide-scenes", 398)])
def test_scenes_are_the_test_set_picture_by_picture(name: str, width: int) -> None:
    from sinkprune.demo.questions import test_set

    drawn = [*zip(test_set(width), load_task(name, limit=12), strict=False)]
    assert len(drawn) == 12
    for (picture, question), item in drawn:
        assert item.question == question
        assert item.load_image().tobytes() == picture.convert("RGB").tobytes()
        assert item.load_image().size == (width, 224)


STATE = [0.5, -1, 2, 0.25, 1e-3]
MOMENT = {"cameras": ["a.png", None], "instruction": "pick up the cup", "state": STATE}


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    """A small policy of two cameras, whose state has five numbers."""
    return read_bundle(bundle("pi0", budgets=("prune-77.8",), max_images=2)).manifest


@pytest.fixture
def moments(tmp_path: Path, photo: Image.Image) -> Callable[..., Path]:
    """Write lines to a file next to two frames."""
    for name in ("a.png", "b.png"):
        photo.crop((0, 0, 60, 40)).save(tmp_path / name)

    def lines(*given: Any) -> Path:
        path = tmp_path / "moments.jsonl"
        path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in given))
        return path

    return lines


def test_moments_are_read(manifest: Manifest, moments: Callable[..., Path]) -> None:
    other = {**MOMENT, "cameras": ["b.png", "a.png"], "id": "second", "instruction": "go"}
    path = moments(MOMENT, "", other)
    folder = path.parent
    first, second = load_moments(manifest, path)
    assert first == Moment("1", (folder / "a.png", None), "pick up the cup", tuple(map(float, STATE)))
    assert (second.id, second.files) == ("second", [folder / "b.png", folder / "a.png"])
    assert first.picture != second.picture and second.prompt == "go"
    assert [image.size for image in second.load_images()] == [(60, 40)] * 2
    # Lines after the limit are not read.
    assert load_moments(manifest, moments(MOMENT, "{"), 1) == [first]


def test_cameras_may_have_names(bundle: Callable[..., Path], moments: Callable[..., Path], tmp_path: Path) -> None:
    plain = bundle("pi0", budgets=("prune-77.8",), max_images=2)
    named = read_bundle(name_cameras(plain, tmp_path / "named", "observation.images.top", "wrist")).manifest
    path = moments({**MOMENT, "cameras": {"wrist": "b.png", "top": "a.png"}})
    assert load_moments(named, path)[0].cameras == (tmp_path / "a.png", tmp_path / "b.png")
    with pytest.raises(TaskError, match=r"line 1: found the cameras top, side, expected top, wrist\."):
        load_moments(named, moments({**MOMENT, "cameras": {"top": "a.png", "side": "b.png"}}))
    with pytest.raises(TaskError, match=r"line 1: \$\.cameras\.wrist: found 3, expected"):
        load_moments(named, moments({**MOMENT, "cameras": {"top": "a.png", "wrist": 3}}))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([1], "line 2: $: found [1], expected an object. The fields are cameras, instruction, state, id (optional)"),
        ({**MOMENT, "cameras": ["a.png"]}, "line 2: found 1 camera, and the policy was exported for 2 cameras"),
        ({**MOMENT, "cameras": [None, None]}, "line 2: no camera has a frame"),
        ({**MOMENT, "cameras": ["a.png", "nothing.png"]}, "nothing.png' is no file, expected a frame."),
        ({**MOMENT, "state": [*STATE[1:], True]}, "$.state[4]: found True, expected a number"),
        ('{"cameras": ["a.png", null], "instruction": "go", "state": [1, 2, 3, 4, NaN]}', "line 2: "),
        ({**MOMENT, "state": STATE[1:]}, "line 2: the state has the shape [4], expected 5 numbers"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(
    line: Any, said: str, manifest: Manifest, moments: Callable[..., Path]
) -> None:
    with pytest.raises(TaskError) as refusal:
        load_moments(manifest, moments(MOMENT, line))
    assert said in str(refusal.value) and "moments.jsonl', line 2: " in str(refusal.value)


def test_other_files_are_refused(manifest: Manifest, moments: Callable[..., Path], tmp_path: Path) -> None:
    for path, said in ((tmp_path, r"expected a file of moments that ends in \.jsonl"), (moments(""), "is empty")):
        with pytest.raises(TaskError, match=said):
            load_moments(manifest, path)
