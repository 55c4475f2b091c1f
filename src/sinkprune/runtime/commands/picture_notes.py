"""Notes on stderr about pictures that the model does not see as they are in their files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from sinkprune.contract.checks.terminal import escaped
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.media.picture_warnings import (
    FileFacts,
    PictureFacts,
    divided,
    first_of,
    picture_facts,
    unseen_notes,
)
from sinkprune.runtime.steps.pictures import named_in_errors


def note_pictures(family: Family, files: Sequence[Path], pictures: Sequence[Picture]) -> list[str]:
    """Print the notes of `note_files` and of `note_sizes`, and return them.

    `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family rejects.
    """
    return note_files(decoded_facts(files, pictures)) + note_sizes(family, files, pictures)


def note_sizes(family: Family, files: Sequence[Path], pictures: Sequence[Picture]) -> list[str]:
    """Print notes on the first picture of each size that is cropped, scaled down, or a clip shown with fewer frames.

    Returns them. `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family
    rejects.
    """
    notes = list[str]()
    first: dict[tuple[float, ...], tuple[Path, Picture]] = {}
    for file, picture in zip(files, pictures, strict=True):
        first.setdefault(picture.size, (file, picture))
    for file, picture in first.values():
        notes += [_note(file, text) for text in _unseen(family, file, picture)]
    return notes


def decoded_facts(files: Sequence[Path], pictures: Sequence[Picture]) -> dict[Path, FileFacts]:
    """Return the facts of image files; `pictures` are those read from `files`, in the same order."""
    pairs = zip(files, pictures, strict=True)
    return {file: picture_facts(image).of_file for file, image in pairs if isinstance(image, Image.Image)}


def note_files(facts: Mapping[Path, FileFacts]) -> list[str]:
    """Print notes, and return them: on the darkest picture of 16 bits, and on the first file with several frames.

    The second has the number of the other such files.
    """
    wide = [(file, own.largest) for file, own in facts.items() if own.largest is not None]
    darkest = [(file, divided(largest)) for file, largest in sorted(wide, key=lambda each: each[1])]
    several = [(file, first_of(own.frames)) for file, own in facts.items() if own.frames > 1]
    return [
        *_note_first(darkest, "file has 16 bits", "files have 16 bits"),
        *_note_first(several, "file has several frames", "files have several frames"),
    ]


def note_many_pictures(family: Family, pictures: Mapping[str, PictureFacts]) -> list[str]:
    """Print the notes of `note_files`, and one on the first picture that is cropped or scaled down; return them.

    It has the number of the other such pictures. `pictures` are all pictures by name. Raises `ImageError` for the
    first that the family rejects.
    """
    notes = note_files({Path(name): facts.of_file for name, facts in pictures.items()})
    of_size: dict[tuple[int, int], list[str]] = {}
    for name, facts in pictures.items():
        of_size.setdefault(facts.size, []).append(name)
    found = list[tuple[Path, str]]()
    for size, names in of_size.items():
        # A layout depends on the size alone, and data has thousands of pictures.
        unseen = _unseen(family, names[0], Image.new("L", size))
        found += [(Path(name), unseen[0]) for name in names if unseen]
    return notes + _note_first(found, "picture is seen in part or smaller", "pictures are seen in part or smaller")


def _unseen(family: Family, file: str | Path, picture: Picture) -> list[str]:
    """Return what `unseen_notes` does; raises `ImageError` with the file's name for what the family rejects."""
    with named_in_errors(file):
        return unseen_notes(family.layout(picture))


def _note_first(found: Sequence[tuple[Path, str]], one: str, several: str) -> list[str]:
    """Print a note on the first file, with the number of the others, and return it in a list; none without files."""
    if not found:
        return []
    (file, text), others = found[0], len(found) - 1
    return [_note(file, f"{text} {others} more {several if others > 1 else one}." if others else text)]


def _note(file: Path, text: str) -> str:
    """Print a note, and return it."""
    # The command has succeeded, also where stderr is closed.
    with suppress(OSError):
        sys.stderr.write(f"{escaped(str(file))}: {text}\n")
    return f"{file}: {text}"
