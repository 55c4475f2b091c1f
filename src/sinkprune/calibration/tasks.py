"""Tasks: questions about pictures, from a test set of this project or a file, and moments of a robot from a file.

A file has one JSON object a line. A question has a `question` and an `image`, the path of the picture relative to the
file. `answer` is a string, or a list of strings that are all right. With `options`, a list of strings, it is the
letter of the right one, its text, or its 0-based number. `choice` is a closed list of replies to an open question.
The default of `id` is the line's number, that of `kind` "unnamed".

A moment has `cameras`, an object of paths by the names of the bundle's cameras, or a list of paths in the order of
the policy's training; `instruction`; and `state`, a list of numbers in the robot's units. Null is a camera without a
frame.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

from PIL import Image

from sinkprune.contract.checks import OPTIONAL, Bounds, SchemaError, from_json
from sinkprune.contract.errors import ImageError, SinkpruneError, TaskError, UsageError
from sinkprune.contract.files.untrusted import UnreadableError, parsed_json, read_bytes
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.questions import Question
from sinkprune.policies.observation import in_trained_order, observed
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.media.picture_warnings import PictureFacts, picture_facts
from sinkprune.runtime.text.answer_form import checked_choices

SCENES = "scenes"
"""The project's own test set, which comes with the package."""
WIDE_SCENES = "wide-scenes"
"""The same questions about pictures of 16:9, whose things are further apart."""
VARIED_SCENES = "varied-scenes"
"""Questions about pictures of several resolutions, with small text and questions of two steps."""
TEST_SETS = (SCENES, WIDE_SCENES, VARIED_SCENES)
UNNAMED = "unnamed"
"""The default kind of a file's questions."""
TASK_BYTES = 256 << 20
"""The largest size of a task's file: about a million questions."""

_GREY = (128, 128, 128)
_OPTIONS = 26
"""Options of a question at most: their letters."""


@dataclass(frozen=True)
class _QuestionLine:
    image: str
    question: str
    answer: str | int | tuple[str, ...]
    options: Annotated[tuple[str, ...], Bounds(2, _OPTIONS)] | None = field(default=None, metadata=OPTIONAL)
    choice: Any = field(default=None, metadata=OPTIONAL)
    kind: str = field(default=UNNAMED, metadata=OPTIONAL)
    id: str | int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class _MomentLine:
    cameras: dict[str, str | None] | tuple[str | None, ...]
    instruction: str
    state: tuple[Annotated[float, Bounds(-1e30, 1e30)], ...]
    id: str | int | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Item:
    question: Question
    picture: str
    """The picture's name; items with the same name have the same picture."""
    load_image: Callable[[], Image.Image]
    """Loads the picture, RGB. Tasks have thousands, so they are loaded one at a time."""
    facts: PictureFacts
    line: str = ""
    """Where the question stands, as in "'FILE', line 3"; empty in a test set."""

    @property
    def place(self) -> str:
        """What messages call the question: its line, or its id in a test set."""
        return self.line or f"question '{self.id}'"

    @property
    def id(self) -> str:
        return self.question.id

    @property
    def prompt(self) -> str:
        """The question with its options, as the model is asked it."""
        return self.question.prompt

    @property
    def files(self) -> list[Path]:
        return [Path(self.picture)]

    def load_images(self) -> list[Image.Image]:
        return [self.load_image()]


Asked = TypeVar("Asked", "Item", "Moment")
Line = TypeVar("Line", _QuestionLine, _MomentLine)


def load_task(name: str, limit: int | None = None, also: str = "") -> list[Item]:
    """Return the first `limit` items of one of `TEST_SETS`, or of a JSONL file.

    `also` completes the message about another `name` with what else the caller takes. Every item and its picture are
    checked. Lines of a file after the limit are not read. Raises `TaskError`.
    """
    if name in TEST_SETS:
        return list(islice(_read_scenes(name), limit))
    if Path(name).suffix.lower() == ".jsonl":
        return list(islice(_read_questions(Path(name)), limit))
    found = "a folder" if Path(name).is_dir() else "no test set"
    if not Path(name).exists():
        found += ", and there is no such file or folder"
    raise TaskError(
        f"'{name}' is {found}. Give {', '.join(map(repr, TEST_SETS))}, {also}or a file of questions that ends in "
        ".jsonl."
    )


def items_by_picture(items: Iterable[Asked]) -> list[list[Asked]]:
    """Return the items of each picture, in the order of their first ones."""
    groups: dict[str, list[Asked]] = {}
    for item in items:
        groups.setdefault(item.picture, []).append(item)
    return list(groups.values())


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Add the place of a question or moment to an error of the block."""
    try:
        yield
    except SinkpruneError as error:
        raise type(error)(f"{place}: {error}") from error


def check_own_questions(data: Path | None) -> None:
    """Raise `TaskError` if data to fit a bundle to is no JSONL file, or a test set, which flatters accuracies."""
    if str(data) in TEST_SETS:
        raise TaskError(
            f"--data is '{data}', the test set: accuracy measured on it later would be too good. Give a file of "
            "other questions that ends in .jsonl."
        )
    if data and data.suffix.lower() != ".jsonl":
        raise TaskError(f"--data is '{data}', expected a file of questions that ends in .jsonl.")


def with_grey_picture(item: Item) -> Item:
    """Return the question with a uniformly grey picture of the same size: right replies to it are guesses."""
    return replace(item, load_image=lambda: Image.new("RGB", item.facts.size, _GREY))


def _read_scenes(name: str) -> Iterator[Item]:
    """Yield the questions of a test set with their pictures, which are drawn from fixed seeds."""
    from sinkprune.demo.questions import test_set, varied_test_set
    from sinkprune.demo.scenes import SIDE, WIDE

    pairs = varied_test_set() if name == VARIED_SCENES else test_set(WIDE if name == WIDE_SCENES else SIDE)
    for number, (_, group) in enumerate(groupby(pairs, key=lambda pair: id(pair[0])), start=1):
        for picture, question in group:
            yield Item(question, f"{name} {number}", picture.copy, picture_facts(picture))


def read_jsonl(path: Path, what: str, line_kind: type[Line], read: Callable[[Line, int], Asked]) -> Iterator[Asked]:
    """Yield what `read` returns for each line, and its number; all have an `id` of their own.

    The file is one of `what`, each line an object that `from_json` reads as `line_kind`. Raises `TaskError` with the
    number of the first bad line.
    """
    names = {each.name: " (optional)" if each.metadata else "" for each in fields(line_kind)}
    known = ", ".join(f"{name}{optional}" for name, optional in names.items())
    try:
        data = read_bytes(path, TASK_BYTES)
    except UnreadableError as error:
        raise TaskError(f"'{path}' {error}. Give a file of {what}.") from error
    lines_of_ids: dict[str, int] = {}
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            try:
                checked = from_json(line_kind, parsed_json(line))
            except UnreadableError as error:
                raise TaskError(f"bad JSON: the line {error}. Expected one object a line: {known}.") from error
            except SchemaError as error:
                raise TaskError(f"{error}. The fields are {known}.") from error
            found = read(checked, number)
            if found.id in lines_of_ids:
                raise TaskError(
                    f"id '{found.id}' is that of line {lines_of_ids[found.id]} too. Give each line its own "
                    "(a line without one has its number)."
                )
        except SinkpruneError as error:
            raise TaskError(f"'{path}', line {number}: {error}") from error
        lines_of_ids[found.id] = number
        yield found
    if not lines_of_ids:
        raise TaskError(f"'{path}' is empty, expected one JSON object a line: {known}.")


def _read_questions(path: Path) -> Iterator[Item]:
    facts: dict[Path, PictureFacts] = {}

    def read(line: _QuestionLine, number: int) -> Item:
        image, question = path.parent / _text("image", line.image), _question(line, number)
        if image not in facts:
            facts[image] = picture_facts(read_image(image))
        return Item(question, str(image), partial(read_image, image), facts[image], f"'{path}', line {number}")

    return read_jsonl(path, "questions", _QuestionLine, read)


def _question(line: _QuestionLine, number: int) -> Question:
    options = tuple(_text("options", option) for option in line.options or ())
    if len(set(options)) < len(options):
        raise TaskError(f"'options' is {list(options)!r}, where two are the same.")
    question = Question(
        id=_text("id", str(number if line.id is None else line.id)),
        kind=_text("kind", line.kind),
        text=_text("question", line.question),
        answers=(_letter(line.answer, options),) if options else _answers(line.answer),
        options=options,
        choice=_choice(line.choice, options),
    )
    if question.closed_list and not any(map(question.is_right, question.closed_list)):
        raise TaskError(
            f"the closed list has no right answer, expected '{question.answers[0]}' in: "
            f"{', '.join(question.closed_list)}. Add it."
        )
    if question.is_right(""):
        raise TaskError(f"the answer {line.answer!r} is empty, or nothing but punctuation. Give the right words.")
    return question


def _text(name: str, words: str) -> str:
    if not words.strip():
        raise TaskError(f"'{name}' is {words!r}, expected words.")
    return words


def _answers(answer: str | int | tuple[str, ...]) -> tuple[str, ...]:
    if answer == () or isinstance(answer, int):
        raise TaskError(f"the answer is {answer!r}, expected a string or a list of strings, or 'options' besides.")
    return tuple(_text("answer", one) for one in ([answer] if isinstance(answer, str) else answer))


def _choice(choice: Any, options: tuple[str, ...]) -> tuple[str, ...]:
    if choice is None:
        return ()
    if options:
        raise TaskError("found 'choice' and 'options', whose letters are the closed list. Leave out one of them.")
    try:
        return checked_choices(choice)
    except UsageError as error:
        raise TaskError(str(error)) from error


def _letter(answer: str | int | tuple[str, ...], options: tuple[str, ...]) -> str:
    letters = string.ascii_uppercase[: len(options)]
    names = enumerate(zip(letters, options, strict=True))
    meant = [letter for number, (letter, option) in names if answer in (letter, option, number)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise TaskError(
            f"the answer {answer!r} is the letter of one option and the text of another. Give its 0-based number."
        )
    raise TaskError(
        f"the answer is {answer!r}, expected a letter from A to {letters[-1]}, the text of an option, or a number "
        f"from 0 to {len(options) - 1}."
    )


@dataclass(frozen=True)
class Moment:
    """A moment of a file, as `Item` is a question of one."""

    id: str
    cameras: tuple[Path | None, ...]
    prompt: str
    """The instruction."""
    state: tuple[float, ...]

    @property
    def picture(self) -> str:
        """The frames' names; moments with the same frames have the same."""
        return " ".join(map(str, self.cameras))

    @property
    def files(self) -> list[Path]:
        return [path for path in self.cameras if path is not None]

    def load_images(self) -> list[Image.Image]:
        return [read_image(path) for path in self.files]


def load_moments(manifest: Manifest, data: Path, limit: int | None = None) -> list[Moment]:
    """Return the first `limit` moments of a JSONL file, for the policy of `manifest`.

    Every moment and its frames are checked. Raises `TaskError` with the number of the first bad line.
    """
    if data.suffix.lower() != ".jsonl":
        raise TaskError(
            f"--data is '{data}', and the bundle is a robot policy: expected a file of moments that ends in .jsonl."
        )
    known = set[Path]()

    def read(line: _MomentLine, number: int) -> Moment:
        cameras = line.cameras
        if isinstance(cameras, dict):
            cameras = tuple(in_trained_order(manifest.acting, cameras))
        paths = tuple(None if path is None else data.parent / path for path in cameras)
        moment = Moment(str(number if line.id is None else line.id), paths, line.instruction, line.state)
        for path in moment.files:
            if not path.is_file():
                raise ImageError(f"'{path}' is no file, expected a frame. Paths are relative to the file of moments.")
        observed(manifest, moment.cameras, moment.prompt, moment.state)
        for path in set(moment.files) - known:
            read_image(path)
        known.update(moment.files)
        return moment

    return [*islice(read_jsonl(data, "moments", _MomentLine, read), limit)]
