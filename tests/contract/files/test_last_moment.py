"""What happens at the last moment of a replacing: others who come or go, interrupts, a system that refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.system_rename import How, Rename, UnsupportedError, system_rename
from support.programs.listed_folders import replaced, whole_version, write_folder


def replace(output: Path, version: int, rename: Rename, *, force: bool = True) -> None:
    with replaced(output, rename=rename, force=force) as root:
        write_folder(root, version)


def acting(act: Callable[[], object]) -> Rename:
    """Renames as the system does, after something else has happened, once."""
    done: list[object] = []

    def rename(source: Path, target: Path, how: How) -> None:
        if not done:
            done.append(act())
        system_rename(source, target, how)

    return rename


def test_what_comes_at_the_last_moment_is_kept_and_told(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)
    rename = acting(lambda: (output / "graphs" / "notes.txt").write_text("mine"))
    with pytest.raises(BundleError, match=r"'graphs/notes\.txt' came into '.*' while it was replaced") as caught:
        replace(output, 2, rename)
    assert whole_version(output) == 2
    (notes,) = tmp_path.glob(".bundle.*.partial/old/graphs/notes.txt")
    assert str(notes.parents[1]) in str(caught.value)
    # Nothing else is left, and nobody removes it later.
    assert sorted(path.name for path in notes.parents[1].rglob("*")) == ["bundle.json", "graphs", "notes.txt"]
    with pytest.raises(BundleError, match=r"'graphs/notes\.txt' came into"):
        replace(output, 3, system_rename)
    notes.rename(tmp_path / "notes.txt")
    replace(output, 3, system_rename)
    assert sorted(tmp_path.iterdir()) == [output, tmp_path / "notes.txt"]


def test_an_interrupt_after_the_exchange_loses_nothing(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)

    def interrupted(source: Path, target: Path, how: How) -> None:
        (output / "notes.txt").write_text("mine")
        system_rename(source, target, how)
        raise KeyboardInterrupt

    with pytest.raises(BundleError, match=r"'notes\.txt' came into") as caught:
        replace(output, 2, interrupted)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert whole_version(output) == 2
    assert len(list(tmp_path.glob(".bundle.*.partial/old/notes.txt"))) == 1


def test_a_folder_of_somebody_else_that_comes_at_the_last_moment(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="is not a bundle"):
        replace(output, 1, acting(output.mkdir))
    assert list(tmp_path.iterdir()) == [output]


def test_one_of_ours_that_comes_at_the_last_moment(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with pytest.raises(BundleError, match="Add --force"):
        replace(output, 2, acting(lambda: write_folder(output, 1)), force=False)
    assert whole_version(output) == 1
    shutil.rmtree(output)
    replace(output, 2, acting(lambda: write_folder(output, 1)))
    assert whole_version(output) == 2
    # And one that goes away.
    replace(output, 3, acting(lambda: shutil.rmtree(output)))
    assert whole_version(output) == 3
    assert list(tmp_path.iterdir()) == [output]


def test_between_two_renames_another_may_be_faster(tmp_path: Path) -> None:
    output, faster = write_folder(tmp_path / "bundle", 1), iter([9])

    def slow(source: Path, target: Path, how: How) -> None:
        if how is How.NO_REPLACE:
            for version in faster:
                write_folder(output, version)
        raise UnsupportedError

    replace(output, 2, slow)
    assert whole_version(output) == 2
    assert list(tmp_path.iterdir()) == [output]


def test_between_two_renames_somebody_else_may_come(tmp_path: Path) -> None:
    output = write_folder(tmp_path / "bundle", 1)

    def slow(source: Path, target: Path, how: How) -> None:
        if how is How.NO_REPLACE:
            output.mkdir()
        raise UnsupportedError

    with pytest.raises(BundleError, match=r"that stood at '.*' lies in '.*' and cannot be put back"):
        replace(output, 2, slow)
    (old,) = tmp_path.glob(".bundle.*.partial/old")
    assert whole_version(old) == 1
    assert list(output.iterdir()) == []


def test_who_is_never_fast_enough_is_told(tmp_path: Path) -> None:
    def overtaken(source: Path, target: Path, how: How) -> None:
        raise FileExistsError(17, "File exists")

    with pytest.raises(BundleError, match="cannot be written: File exists"):
        replace(tmp_path / "bundle", 1, overtaken)
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_is_refused_is_told(tmp_path: Path) -> None:
    def refused(source: Path, target: Path, how: How) -> None:
        raise PermissionError(1, "Operation not permitted")

    output = write_folder(tmp_path / "bundle", 1)
    with pytest.raises(BundleError, match="cannot be written: Operation not permitted"):
        replace(output, 2, refused)
    assert whole_version(output) == 1
    assert list(tmp_path.iterdir()) == [output]
