"""Only folders of ours are replaced, whole or not at all, by one process at a time; remains of killed ones go."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import check_outside, check_replaceable, recover
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


def test_a_manifest_that_is_not_ours(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    manifest = output / "bundle.json"
    manifest.rename(tmp_path / "elsewhere")
    assert "is not a bundle" in refusal(output)
    assert "is not a bundle" in refusal(output / "license")
    for content, said in (
        ("{", "is not JSON"),
        ("[]", "is none of sinkprune's"),
        ('{"format_version": 4, "files": {}}', "is none of sinkprune's"),
        ('{"sinkprune_version": "1", "files": ["a"]}', "is none of sinkprune's"),
    ):
        manifest.write_text(content)
        message = refusal(output)
        assert f"'{output}' exists and is not a bundle: its bundle.json {said}" in message
        assert "left as it is" in message
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "elsewhere"), Path.mkdir):
        manifest.unlink()
        make(manifest)
        assert "is not a bundle" in refusal(output)


@pytest.mark.parametrize("name", ["graphs/notes.txt", ".hidden", "full/notes.txt", "\x1b[31m"])
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
def test_what_is_listed_must_be_what_the_manifest_says(listed: str, tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    place = output / listed
    place.rename(tmp_path / "elsewhere")
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "elsewhere")):
        make(place)
        assert repr(listed) in refusal(output)
        place.unlink()
    place.mkdir()
    (place / "inner").write_text("mine")
    assert repr(f"{listed}/inner") in refusal(output)


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
    for output in (source, source / "a" / "b", tmp_path / "link" / "out", source / ".." / "source/out"):
        with pytest.raises(BundleError, match="lies within"):
            check_outside(output, source, KIND)
    for output in (tmp_path / "source-2", tmp_path, source / ".." / "out"):
        check_outside(output, source, KIND)
    check_outside(tmp_path / "hub" / "name" / "out", tmp_path / "hub" / "name", KIND)


def dead(output: Path, *, new: int | None = None, old: int | None = None) -> Path:
    """Make the staging folder that a killed process left, with these versions in it."""
    place = output.with_name(f".{output.name}.partial")
    place.mkdir()
    for name, version in (("new", new), ("old", old)):
        if version is not None:
            write_folder(place / name, version)
    return place


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    with replaced(output) as root:
        write_folder(root, 2)
        with pytest.raises(BundleError, match="another command is writing"), replaced(output):
            pytest.fail("two write at once")
    assert whole_version(output) == 2
    shutil.rmtree(output)
    with replaced(output) as root:
        with pytest.raises(BundleError, match="another command is writing"):
            recover(output, KIND)
        write_folder(root, 3)
    assert [*tmp_path.iterdir()] == [output]


def test_without_locks_only_a_new_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    output = tmp_path / "bundle"
    replace(output, 1)
    replace(output, 2)
    place = dead(output, new=3)
    with pytest.raises(BundleError, match=f"If none is running, remove '{place}'"):
        replace(output, 4)
    assert (whole_version(output), whole_version(place / "new")) == (2, 3)


def half_written(output: Path) -> None:
    new = dead(output, new=5) / "new"
    (new / "bundle.json").write_text('{"format')
    (new / "unlisted").mkdir()


LEFT: dict[str, Callable[[Path], object]] = {
    "before writing": dead,
    "while writing": half_written,
    "before the renames": lambda output: dead(output, new=5),
    "after the renames": lambda output: dead(output, old=5),
    "while removing": lambda output: (dead(output, new=5) / "new" / "bundle.json").unlink(),
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_what_the_dead_left_is_removed(leave: Callable[[Path], object], tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    leave(output)
    check_replaceable(output, KIND, force=True)
    recover(output, KIND)
    assert len(list(tmp_path.iterdir())) == 2, "a check removes nothing"
    replace(output, 2)
    assert list(tmp_path.iterdir()) == [output]


def test_nothing_is_removed_through_links(tmp_path: Path) -> None:
    output, mine = write_folder(tmp_path / "bundle", 1), write_folder(tmp_path / "mine", 7)
    place = dead(output, old=5)
    shutil.rmtree(place / "old" / "graphs")
    (place / "old" / "graphs").symlink_to(mine / "graphs")
    replace(output, 2)
    assert not place.exists()
    place.symlink_to(mine)
    with pytest.raises(BundleError, match="cannot be written"):
        replace(output, 2)
    place.unlink()
    dead(output)
    (place / "new").symlink_to(mine)
    with pytest.raises(BundleError, match="cannot be removed"):
        replace(output, 2)
    assert (whole_version(output), whole_version(mine)) == (2, 7)


def test_what_was_moved_away_is_put_back(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    recover(output, KIND)
    assert whole_version(output) == 1
    shutil.rmtree(output)
    recover(output, KIND)
    assert not output.exists(), "what was never moved away"
    shutil.rmtree(place)
    dead(output, old=1)
    recover(output, KIND)
    assert not output.exists(), "what was replaced"


def test_what_was_moved_away_is_never_lost_to_what_came_after(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    place = dead(output, new=2, old=1)
    write_folder(output, 9)
    with pytest.raises(BundleError, match=r"lies in '.*old' and cannot be put back: File exists"):
        replace(output, 10)
    assert (whole_version(output), whole_version(place / "old")) == (9, 1)
