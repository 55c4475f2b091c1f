"""Outputs are written completely or not at all, and never replace an input or anything but a regular file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sinkprune.contract.errors import OutputError
from sinkprune.contract.files.output_files import check_apart, check_outputs, check_writable, write_whole

PICTURES = (".png", ".jpg")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A photo, and a folder next to it."""
    (tmp_path / "photo.jpg").write_bytes(b"photo")
    (tmp_path / "d").mkdir()
    return tmp_path


def refusal(*outputs: Path, read: tuple[Path, ...] = (), folders: tuple[Path, ...] = ()) -> str:
    with pytest.raises(OutputError) as caught:
        check_outputs([(path, PICTURES) for path in outputs], read, folders)
    return str(caught.value)


def test_an_output_is_none_of_the_files_that_are_read_whatever_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = folder / "photo.jpg"
    (folder / "same").symlink_to(folder)
    (folder / "linked.jpg").symlink_to("photo.jpg")
    (folder / "hard.jpg").hardlink_to(photo)
    monkeypatch.chdir(folder)
    for name in ("photo.jpg", "d/../photo.jpg", "d/../d/../photo.jpg", "same/photo.jpg", "hard.jpg"):
        assert "would be overwritten, and it is read" in refusal(Path(name), read=(photo,))
        assert "would be overwritten, and it is read" in refusal(photo, read=(Path(name),))
        with pytest.raises(OutputError, match="would be overwritten, and it is read"):
            check_apart([Path(name)], [photo])
    assert "would be overwritten, and it is read" in refusal(photo, read=(Path("linked.jpg"),))
    check_outputs([(folder / "kept.jpg", PICTURES)], [photo, folder / "missing.jpg"], [folder / "d"])
    check_apart([folder / "kept.jpg"], [photo])


def test_an_output_lies_in_no_folder_that_is_read(folder: Path) -> None:
    (folder / "d" / "graphs").mkdir()
    (folder / "other").symlink_to("d")
    for place in ("d", "d/graphs", "other", "other/graphs", "d/../d"):
        assert "lies in" in refusal(folder / place / "kept.png", folders=(folder / "d",))
        assert "lies in" in refusal(folder / "d" / "kept.png", folders=(folder / "other",))
    check_outputs([(folder / "kept.png", PICTURES)], folders=[folder / "d", folder / "none"])


def test_two_outputs_are_two_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert "are the same file" in refusal(Path("new.png"), folder / "d" / ".." / "new.png")
    (folder / "one.png").write_bytes(b"")
    (folder / "two.png").hardlink_to(folder / "one.png")
    assert "are the same file" in refusal(folder / "one.png", folder / "two.png")
    check_outputs([(folder / "a.png", PICTURES), (folder / "b.png", PICTURES)])


def test_what_is_no_regular_file_is_not_replaced(folder: Path) -> None:
    os.mkfifo(folder / "fifo.png")
    assert "is a FIFO, a socket or a device" in refusal(folder / "fifo.png")
    (folder / "dangling.png").symlink_to("gone.png")
    (folder / "linked.png").symlink_to("photo.jpg")
    for name in ("dangling.png", "linked.png"):
        assert "is a link" in refusal(folder / name)
    (folder / "folder.png").mkdir()
    assert "a folder stands there" in refusal(folder / "folder.png")
    for device in ("/dev/null", "/dev/stdout"):
        with pytest.raises(OutputError):
            check_writable(Path(device), ("",))


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(folder: Path) -> None:
    write_whole(folder / "kept.png", b"first")
    write_whole(folder / "kept.png", b"second")
    assert (folder / "kept.png").read_bytes() == b"second"
    assert sorted(path.name for path in folder.iterdir()) == ["d", "kept.png", "photo.jpg"]
    with pytest.raises(OutputError, match="cannot be written"):
        write_whole(folder / "gone" / "kept.png", b"")
    with pytest.raises(OSError):
        write_whole(folder / "d", b"")
    assert sorted(path.name for path in folder.iterdir()) == ["d", "kept.png", "photo.jpg"]


def test_a_file_is_on_the_disk_before_it_has_its_name(folder: Path) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        seen.append(f"synced {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def watched_replace(source: str, target: str) -> None:
        seen.append("renamed")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "replace", watched_replace)
        write_whole(folder / "kept.png", b"12345")
    assert seen == ["synced 5 bytes", "renamed"]
