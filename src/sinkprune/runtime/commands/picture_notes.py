"""Notes on stderr about pictures that the model does not see as they are in their files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from PIL import Image

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.checks.terminal import escaped
from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.clip import Picture
from sinkprune.runtime.media.images import frame_count
from sinkprune.runtime.steps.picture_warnings import (
    PictureFacts,
    divided,
    first_of,
    largest_of_16_bits,
    limit_notes,
    seen_part,
)
from sinkprune.runtime.steps.pictures import layout_of


def note_pictures(
    family: Family, manifest: Manifest, files: Sequence[Path], pictures: Sequence[Picture]
) -> list[str]:
    """Print notes, and return them: on the darkest image of 16 bits, on each image file with several frames, and on
    the first picture of each size that is cropped, scaled down, or a clip shown with fewer frames.

    `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family rejects.
    """
    images = [(file, image) for file, image in zip(files, pictures, strict=True) if isinstance(image, Image.Image)]
    notes = _note_darkest({file: largest_of_16_bits(image) for file, image in images})
    for file, frames in {file: frame_count(image) for file, image in images}.items():
        if frames > 1:
            notes.append(_note(file, first_of(frames)))
    first: dict[tuple[float, ...], tuple[Path, Picture]] = {}
    for file, picture in zip(files, pictures, strict=True):
        first.setdefault(picture.size, (file, picture))
    for file, picture in first.values():
        layout = layout_of(file, picture, family, manifest)
        if layout.seen_share < 1:
            notes.append(_note_part(file, layout))
        notes += [_note(file, text) for text in limit_notes(layout)]
    return notes


def note_frames(frames: Mapping[Path, int]) -> list[str]:
    """Print a note on the first file with several frames, and how many others have them; return it in a list.

    `frames` are numbers of frames by file.
    """
    several = [(file, count) for file, count in frames.items() if count > 1]
    if not several:
        return []
    others = len(several) - 1
    more = f" {counted(others, 'more file')} {'have' if others > 1 else 'has'} several frames." if others else ""
    return [_note(several[0][0], first_of(several[0][1]) + more)]


def note_many_pictures(family: Family, manifest: Manifest, pictures: Mapping[str, PictureFacts]) -> None:
    """Print notes: on the darkest picture of 16 bits, on those with several frames, and on the first that is cropped
    or scaled down.

    `pictures` are all pictures by name. Raises `ImageError` for the first that the family rejects.
    """
    _note_darkest({Path(name): facts.largest for name, facts in pictures.items()})
    note_frames({Path(name): facts.frames for name, facts in pictures.items()})
    known: dict[tuple[int, int], str] = {}
    for name, facts in pictures.items():
        known.setdefault(facts.size, name)
    for size, name in known.items():
        # A layout depends on the size alone, and data has thousands of pictures.
        layout = layout_of(name, Image.new("L", size), family, manifest)
        if layout.seen_share < 1:
            _note_part(Path(name), layout)
            return
        if notes := limit_notes(layout):
            _note(Path(name), notes[0])
            return


def _note_darkest(largest: Mapping[Path, int | None]) -> list[str]:
    """Print a note on the darkest file of 16 bits, and return it in a list.

    `largest` has the `largest_of_16_bits` of each file.
    """
    found = {file: value for file, value in largest.items() if value is not None}
    if not found:
        return []
    darkest = min(found, key=found.__getitem__)
    return [_note(darkest, divided(found[darkest]))]


def _note_part(file: Path, layout: VisualLayout) -> str:
    return _note(file, f"{seen_part(layout)}. --fit pad shows it all (docs/pictures.md).")


def _note(file: Path, text: str) -> str:
    """Print a note, and return it."""
    # The command has succeeded, also where stderr is closed.
    with suppress(OSError):
        sys.stderr.write(f"{escaped(str(file))}: {text}\n")
    return f"{file}: {text}"
