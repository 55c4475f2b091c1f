"""Renames in one step, and the fallback without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinkprune.contract.files.system_calls import Rename, RenameMode, move, system_rename
from support.programs.listed_folders import no_such_rename

WAYS = pytest.mark.parametrize("rename", [system_rename, no_such_rename], ids=["one step", "plain"])


def folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).touch()
    return path


def test_two_folders_change_places(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one", "a"), folder(tmp_path / "other \udcff", "b")
    system_rename(one, other, RenameMode.EXCHANGE)
    assert (one / "b").is_file()
    assert (other / "a").is_file()


def test_what_the_system_refuses_is_an_error(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other")
    with pytest.raises(FileExistsError, match=r"one' -> .*other'"):
        system_rename(one, other, RenameMode.NO_REPLACE)
    with pytest.raises(FileNotFoundError):
        system_rename(one, tmp_path / "none", RenameMode.EXCHANGE)


def test_a_system_without_the_call_is_an_error_that_move_expects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *given, **options: object())
    with pytest.raises(OSError, match="Function not implemented"):
        system_rename(folder(tmp_path / "one", "a"), tmp_path / "two", RenameMode.NO_REPLACE)
    move(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two" / "a").is_file()


@WAYS
def test_moving_replaces_nothing(rename: Rename, tmp_path: Path) -> None:
    source = folder(tmp_path / "source", "a")
    empty, file, link = folder(tmp_path / "empty"), tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nowhere")
    for target in (empty, file, link):
        with pytest.raises(FileExistsError):
            move(source, target, rename)
    move(source, tmp_path / "target", rename)
    assert (tmp_path / "target" / "a").is_file()
