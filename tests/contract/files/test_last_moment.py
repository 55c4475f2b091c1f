"""The last moment of a replacing: other processes, interrupts, and failing renames."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.system_calls import Rename, RenameMode, system_rename
from support.programs.listed_folders import no_such_rename, replace, whole_version, write_folder


def acting(act: Callable[[], object]) -> Rename:
    """Return a rename that first runs `act`, once."""
    done: list[object] = []

    def rename(source: Path, target: Path, how: RenameMode) -> None:
        if not done:
            done.append(act())
        system_rename(source, target, how)

    return rename


def test_files_that_appear_at_the_last_moment_are_kept_and_reported(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    rename = acting(lambda: (output / "graphs" / "notes.txt").write_text("mine"))
    with pytest.raises(BundleError, match=r"'graphs/notes\.txt' came into '.*' while it was replaced") as caught:
        replace(output, 2, rename=rename)
    assert whole_version(output) == 2
    (notes,) = tmp_path.glob(".bundle.*.partial/old/graphs/notes.txt")
    assert str(notes.parents[1]) in str(caught.value)
    # Nothing else is left, and no later command removes the file.
    assert sorted(path.name for path in notes.parents[1].rglob("*")) == ["bundle.json", "graphs", "notes.txt"]
    with pytest.raises(BundleError, match=r"'graphs/notes\.txt' came into"):
        replace(output, 3)
    notes.rename(tmp_path / "notes.txt")
    replace(output, 3)
    assert sorted(tmp_path.iterdir()) == [output, tmp_path / "notes.txt"]


def test_an_interrupt_after_the_exchange_loses_nothing(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)

    def interrupted(source: Path, target: Path, how: RenameMode) -> None:
        (output / "notes.txt").write_text("mine")
        system_rename(source, target, how)
        raise KeyboardInterrupt

    with pytest.raises(BundleError, match=r"'notes\.txt' came into") as caught:
        replace(output, 2, rename=interrupted)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert whole_version(output) == 2
    assert len(list(tmp_path.glob(".bundle.*.partial/old/notes.txt"))) == 1


def test_a_folder_of_somebody_else_that_comes_at_the_last_moment(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="is not a bundle"):
        replace(output, 1, rename=acting(output.mkdir))
    assert list(tmp_path.iterdir()) == [output]


def test_one_of_ours_that_comes_at_the_last_moment(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="Add --force"):
        replace(output, 2, rename=acting(lambda: write_folder(output, 1)), force=False)
    assert whole_version(output) == 1
    shutil.rmtree(output)
    replace(output, 2, rename=acting(lambda: write_folder(output, 1)))
    assert whole_version(output) == 2
    # And one that goes away.
    replace(output, 3, rename=acting(lambda: shutil.rmtree(output)))
    assert whole_version(output) == 3
    assert list(tmp_path.iterdir()) == [output]


def test_between_two_renames_another_may_be_faster(tmp_path: Path) -> None:
    output, faster = write_folder(tmp_path / "bundle", 1), iter([9])

    def slow(source: Path, target: Path, how: RenameMode) -> None:
        if how is RenameMode.NO_REPLACE:
            for version in faster:
                write_folder(output, version)
        no_such_rename(source, target, how)

    replace(output, 2, rename=slow)
    assert whole_version(output) == 2
    assert list(tmp_path.iterdir()) == [output]


def test_between_two_renames_somebody_else_may_come(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)

    def slow(source: Path, target: Path, how: RenameMode) -> None:
        if how is RenameMode.NO_REPLACE:
            output.mkdir()
        no_such_rename(source, target, how)

    with pytest.raises(BundleError, match=r"that stood at '.*' lies in '.*' and cannot be put back"):
        replace(output, 2, rename=slow)
    (old,) = tmp_path.glob(".bundle.*.partial/old")
    assert whole_version(old) == 1
    assert list(output.iterdir()) == []


@pytest.mark.parametrize("error", [FileExistsError(17, "File exists"), PermissionError(1, "Operation not permitted")])
@pytest.mark.parametrize("there", [None, 1])
def test_a_rename_that_always_fails_changes_nothing(error: OSError, there: int | None, tmp_path: Path) -> None:
    def failing(source: Path, target: Path, how: RenameMode) -> None:
        raise error

    output = tmp_path / "bundle"
    if there:
        write_folder(output, there)
    with pytest.raises(BundleError, match=f"cannot be written: {error.strerror}"):
        replace(output, 2, rename=failing)
    assert list(tmp_path.iterdir()) == ([output] if there else [])
    assert not there or whole_version(output) == there
