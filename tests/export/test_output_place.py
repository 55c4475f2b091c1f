"""A folder that cannot be written is rejected in one message, and nothing is changed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.programs.commands import assert_refused, own_process, run

Checkpoints = Callable[[str], Path]
Bundles = Callable[..., Path]

KINDS = {"sinkprune-export": "checkpoint", "sinkprune-build": "bundle"}
"""What each command reads."""


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


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "force"])
@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "'.' names no new folder"),
        ("..", "'..' names no new folder"),
        ("folder/..", "names no new folder"),
        ("/", "'/' names no new folder"),
        ("file", "'file' exists and is not"),
        ("folder", "'folder' exists and is not"),
        ("empty", "'empty' exists and is not"),
        ("link", "'link' is a link to 'folder'"),
        ("link/", "'link' is a link to 'folder'"),
        ("dangling", "'dangling' is a link to 'nowhere'"),
        ("dangling/out", "dangling' is no folder"),
        ("loop", "'loop' is a link to 'loop'"),
        ("loop/out", "loop' is no folder"),
        ("file/out", "file' is no folder"),
        ("file/a/b/out", "file' is no folder"),
        ("/dev/null", "'/dev/null' exists and is not"),
        ("/dev/null/out", "'/dev/null' is no folder"),
        (os.fsdecode(b"out\xff"), "the name 'out\\udcff' is not UTF-8"),
        (os.fsdecode(b"out\xff/out"), "is not UTF-8"),
        ("a\0b", "the name 'a\\x00b' holds a NUL"),
        ("a" * 238, "has a name of 238 bytes, expected at most 237"),
        ("ä" * 119, "has a name of 238 bytes, expected at most 237"),
        ("a" * 300 + "/out", "cannot be written: File name too long"),
        ("a/" * 3000 + "out", "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_be(
    output: str, message: str, force: tuple[str, ...], place: Path, checkpoint: Checkpoints, bundle: Bundles
) -> None:
    before = names(place)
    assert_refused(run("sinkprune-export", checkpoint("gqa-112"), "-o", output, *force), message)
    assert_refused(
        run("sinkprune-build", bundle("gqa-112"), "-o", output, "--target", "onnxruntime", *force), message
    )
    assert names(place) == before


def test_the_longest_name_there_can_be(place: Path, checkpoint: Checkpoints) -> None:
    source = checkpoint("gqa-112")
    assert run("sinkprune-export", source, "-o", "a" * 237, "--budgets", "retain-64").code == 0
    assert (place / ("a" * 237) / "bundle.json").is_file()


def test_a_name_that_is_not_utf_8_is_reported(place: Path) -> None:
    command = own_process("sinkprune-export", "llava-1.1b", "--random-weights", "-o", os.fsdecode(b"out\xff"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: the name 'out\\udcff' is not UTF-8. Choose another.\n"


def test_what_is_read_is_not_written_into(place: Path, checkpoint: Checkpoints, bundle: Bundles) -> None:
    for command, source, options in (
        ("sinkprune-export", checkpoint("gqa-112"), ()),
        ("sinkprune-build", bundle("gqa-112"), ("--target", "onnxruntime")),
    ):
        (place / KINDS[command]).symlink_to(source)
        before = names(source)
        for output in (source, source.parent):
            assert_refused(run(command, source, "-o", output, "--force", *options), f"'{output}' exists and is not a")
        assert names(source) == before


def test_engines_do_not_lie_within_their_bundle(place: Path, bundle: Bundles) -> None:
    # A file that its manifest does not list would make it no bundle.
    source = bundle("gqa-112")
    (place / "to-bundle").symlink_to(source)
    for output in (source / "out", source / "deeper" / "out", place / "to-bundle" / "out"):
        outcome = run("sinkprune-build", source, "-o", output, "--target", "onnxruntime")
        assert_refused(outcome, f"'{output}' lies within '{source}'")


def test_from_python_too(place: Path, checkpoint: Checkpoints) -> None:
    with pytest.raises(BundleError, match="is a link"):
        export_bundle(ExportRequest(str(checkpoint("gqa-112"))), Path("link"), force=True)
