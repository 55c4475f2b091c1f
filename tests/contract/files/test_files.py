"""Files are read without trust, and written whole or not at all, never over an input or anything but a file."""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from sinkprune.contract.errors import OutputError, UsageError
from sinkprune.contract.files.numbered_files import by_number
from sinkprune.contract.files.output_files import check_apart, check_outputs, check_writable, write_whole
from sinkprune.contract.files.untrusted import MissingError, UnreadableError, open_regular, parsed_json, read_bytes
from sinkprune.contract.files.versioned_file import write_versioned


def test_only_regular_files_of_the_limit_are_read_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "ten").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("ten")
    assert read_bytes(tmp_path / "ten", 10) == read_bytes(tmp_path / "link", 10) == b"0123456789"
    os.mkfifo(tmp_path / "fifo")
    for path, most, said in (
        (tmp_path / "ten", 9, "has 10 bytes, expected at most 9"),
        (tmp_path / "fifo", 10, "is a FIFO, expected a regular file"),
        (Path("/dev/zero"), 10, "is a device"),
        (tmp_path, 10, "is a folder"),
    ):
        with pytest.raises(UnreadableError, match=said):
            read_bytes(path, most)
    with pytest.raises(UnreadableError, match="is a link"):
        read_bytes(tmp_path / "link", 10, follow_links=False)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(UnreadableError, match="is a socket"):
            read_bytes(tmp_path / "socket", 10)
    for name in ("none", "ten/below", "nul\0", "\ud800"):
        with pytest.raises(MissingError):
            open_regular(tmp_path / name)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff{}", "not UTF-8"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[1e999]", "1e999 is no number"),
        (b"1" * 5000, "not JSON"),
        (b'{"a":' * 65 + b"0" + b"}" * 65, "nested more than 64 deep"),
        # As deep as exhausts the parser's stack.
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 64 deep"),
        (b"[" * 100_000, "nested more than 64 deep"),
        (rb'{"a": "\uD800"}', "half of a surrogate pair"),
    ],
)
def test_what_is_no_json_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        parsed_json(data)


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


@dataclass(frozen=True)
class _Kept:
    ms: float
    kept_version: int = 1


def test_links_devices_and_files_of_bundles_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "bundle" / "graphs").mkdir(parents=True)
    (tmp_path / "bundle" / "bundle.json").write_text("precious")
    (tmp_path / "named").symlink_to("bundle")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "engines.json").write_text("precious")
    (tmp_path / "link.json").symlink_to("bundle/bundle.json")
    before = sorted(tmp_path.rglob("*"))
    for name, said in (
        # Places without a bundle are those of `check_outputs`, above.
        ("link.json", "is a link"),
        ("bundle/bundle.json", "lies in '.*bundle', whose bundle.json lists"),
        ("named/graphs/kept.json", "lies in '.*bundle', whose bundle.json lists"),
        ("engines/kept.json", "lies in '.*engines', whose engines.json lists"),
    ):
        with pytest.raises(OutputError, match=said):
            write_versioned(tmp_path / name, _Kept(3.0))
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "bundle" / "bundle.json").read_text() == "precious"


@pytest.mark.parametrize(
    "names",
    [
        ["0.jpg", "9.png", "10.jpg", "100.bmp"],
        ["frame_8.png", "frame_09.png", "frame_0010.png"],
        ["ep2_cam1_9.png", "ep2_cam1_10.png", "ep2_cam2_1.png", "ep10_cam1_1.png"],
        ["1700000000.175304.png", "1700000000.211214.png", "1700000001.011214.png", "1700000010.000001.png"],
        ["2024-01-09_23-59-59.png", "2024-01-10_00-00-00.png", "2024-10-01_00-00-00.png"],
        ["shot.png", "shot1.png", "shot2.jpg", "shot10.png", "shots.png"],
        ["shot.png", "shot (9).png", "shot (10).png"],
        ["01.png", "1.png", "1b.png", "a.png"],
        ["v1.9_9.png", "v1.9_10.png"],
    ],
)
def test_numbers_count_as_numbers(names: list[str]) -> None:
    for seed in range(3):
        given = [Path("folder") / name for name in names]
        random.Random(seed).shuffle(given)
        assert [path.name for path in by_number(given)] == names


@pytest.mark.parametrize(
    "names", [["1700000000.5.png", "1700000000.25.png"], ["0.9.png", "0.10.png"], ["2024.9.30.png", "2024.10.1.png"]]
)
def test_an_unclear_point_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match=r"whose order is unclear.*equally many digits"):
        by_number([Path("frames") / name for name in [*names, "7.png"]])
    assert by_number([]) == []
