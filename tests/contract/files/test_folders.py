"""Only folders of ours are replaced, completely or not at all, and no other files are lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import check_outside
from support.programs.listed_folders import KIND, replace, replaced, whole_version, write_folder


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder: contents of files, None for anything else."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def refusal(output: Path, *, force: bool = True) -> str:
    """Return the error of a replacing that changes nothing."""
    before = tree(output.absolute().parent)
    with pytest.raises(BundleError) as caught, replaced(output, force=force):
        pytest.fail("the block was entered")
    assert tree(output.absolute().parent) == before
    return str(caught.value)


def test_a_new_folder_and_those_above_it_are_made(tmp_path: Path) -> None:
    output = tmp_path / "a" / "b" / "bundle"
    replace(output, 1, force=False)
    assert whole_version(output) == 1
    assert output.stat().st_mode == output.parent.stat().st_mode
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("format_version", [1, 4, 99])
def test_ours_is_replaced_with_force(format_version: int, tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1, format_version=format_version)
    (output / "bundle.json.sig").write_bytes(b"signed")
    assert "Add --force" in refusal(output, force=False)
    replace(output, 2)
    assert whole_version(output) == 2
    assert list(tmp_path.iterdir()) == [output]


def test_whatever_goes_wrong_the_folder_stays_as_it_was(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    with pytest.raises(ZeroDivisionError), replaced(output) as root:
        write_folder(root, 2)
        _ = 1 // 0
    assert whole_version(output) == 1
    with pytest.raises(ZeroDivisionError), replaced(tmp_path / "a" / "b" / "bundle"):
        _ = 1 // 0
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "is none of sinkprune's"),
        ("{}", "is none of sinkprune's"),
        ('{"format_version": 4, "files": {}}', "is none of sinkprune's"),
        ('{"sinkprune_version": "1", "files": ["a"]}', "is none of sinkprune's"),
    ],
)
def test_a_manifest_that_does_not_read_as_ours(content: str, said: str, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    output.mkdir()
    (output / "bundle.json").write_text(content)
    message = refusal(output)
    assert f"'{output}' exists and is not a bundle: its bundle.json {said}" in message
    assert "left as it is" in message


@pytest.mark.parametrize("kind", ["nothing", "folder", "link", "FIFO"])
def test_a_manifest_that_is_no_file(kind: str, tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    (output / "bundle.json").rename(tmp_path / "elsewhere")
    manifest = output / "bundle.json"
    if kind == "folder":
        manifest.mkdir()
    if kind == "link":
        manifest.symlink_to(tmp_path / "elsewhere")
    if kind == "FIFO":
        os.mkfifo(manifest)
    assert "is not a bundle" in refusal(output)
    assert "is not a bundle" in refusal(output / "license")


@pytest.mark.parametrize("name", ["notes.txt", "graphs/notes.txt", ".hidden", "full/notes.txt", "\x1b[31m"])
def test_what_the_manifest_does_not_list_is_never_replaced(name: str, tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    stranger = output / name
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("mine")
    assert f"holds what its bundle.json does not list: {name!r}. Move it away" in refusal(output)
    for other in ("~a", "~b", "~c"):
        (output / other).touch()
    assert f"does not list: {name!r}, '~a', '~b' and 1 more." in refusal(output)


@pytest.mark.parametrize("listed", ["license", "graphs/vision.onnx", "graphs"])
@pytest.mark.parametrize("kind", ["link", "FIFO", "folder"])
def test_what_is_listed_must_be_what_the_manifest_says(kind: str, listed: str, tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    place = output / listed
    place.rename(tmp_path / "elsewhere")
    if kind == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "FIFO":
        os.mkfifo(place)
    else:
        place.mkdir()
        place /= "inner"
        place.write_text("mine")
    assert repr(str(place.relative_to(output))) in refusal(output)


def test_the_disk_holds_everything_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, system = write_folder(tmp_path / "bundle", 1), os.fsync
    before: set[str] = set()
    after: set[str] = set()

    def fsync(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        (before if whole_version(output) == 1 else after).add(path)
        assert whole_version(output) == 1 or list(tmp_path.glob(".bundle.partial/old/bundle.json"))
        system(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with replaced(output) as root:
        write_folder(root, 2)
        written = {str(path) for path in (root, *root.rglob("*"))}
    assert written <= before
    assert {str(tmp_path), str(root.parent)} <= after


def test_what_is_read_is_not_written_into(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(source / "inner")
    for output in (
        source,
        source / "out",
        source / "a" / "b",
        tmp_path / "link" / "out",
        source / ".." / "source/out",
    ):
        with pytest.raises(BundleError, match="lies within"):
            check_outside(output, source, KIND)
    for output in (tmp_path / "source-2", tmp_path, source / ".." / "out"):
        check_outside(output, source, KIND)
    check_outside(tmp_path / "hub" / "name" / "out", tmp_path / "hub" / "name", KIND)
