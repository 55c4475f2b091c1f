"""A folder that cannot be written is rejected in one message, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.programs.commands import assert_refused, run

Checkpoints = Callable[[str], Path]
Bundles = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that commands run in, with a file, a folder of the user's, and links in it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("..", "'..' names no new folder"),
        ("file", "'file' exists and is not"),
        ("folder", "'folder' exists and is not"),
        ("link", "'link' is a link to 'folder'"),
        ("dangling", "'dangling' is a link to 'nowhere'"),
        ("loop", "'loop' is a link to 'loop'"),
        ("file/out", "file' is no folder"),
        (os.fsdecode(b"out\xff"), "the name 'out\\udcff' is not UTF-8"),
        ("a\0b", "the name 'a\\x00b' holds a NUL"),
        ("a" * 250, "cannot be written: File name too long"),
        ("a/" * 3000 + "out", "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_be(output: str, message: str, place: Path, checkpoint: Checkpoints) -> None:
    before = names(place)
    assert_refused(run("sinkprune-export", checkpoint("gqa-112"), "-o", output, "--force"), message)
    assert names(place) == before


def test_what_is_read_is_not_written_into(place: Path, checkpoint: Checkpoints, bundle: Bundles) -> None:
    source, read = checkpoint("gqa-112"), bundle("gqa-112")
    before = names(source), names(read)
    for output in (source, source.parent):
        assert_refused(run("sinkprune-export", source, "-o", output, "--force"), f"'{output}' exists and is not a")
    # A file that its manifest does not list would make it no bundle.
    (place / "to-bundle").symlink_to(read)
    exported = run("sinkprune-export", source, "-o", read / "deeper" / "out")
    assert_refused(exported, "whose bundle.json lists all its files")
    for output in (read / "deeper" / "out", place / "to-bundle" / "out"):
        built = run("sinkprune-build", read, "-o", output, "--target", "onnxruntime")
        assert_refused(built, f"'{output}' lies within '{read}'")
    assert (names(source), names(read)) == before
