"""Untrusted files: anything but regular files, UTF-8 and JSON of limited size is rejected at once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sinkprune.contract.files.untrusted import MissingError, UnreadableError, open_regular, parsed_json, read_bytes


def test_a_file_of_the_limit_is_read_and_one_byte_more_refused(tmp_path: Path) -> None:
    (tmp_path / "ten").write_bytes(b"0123456789")
    assert read_bytes(tmp_path / "ten", 10) == b"0123456789"
    with pytest.raises(UnreadableError, match="has 10 bytes, expected at most 9"):
        read_bytes(tmp_path / "ten", 9)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnreadableError, match="is a FIFO, expected a regular file"):
        read_bytes(tmp_path / "fifo", 10)
    with pytest.raises(UnreadableError, match="is a device"):
        read_bytes("/dev/zero", 10)
    with pytest.raises(UnreadableError, match="is a folder"):
        read_bytes(tmp_path, 10)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(UnreadableError, match="is a socket"):
            read_bytes(tmp_path / "socket", 10)


def test_missing_files_and_impossible_names_are_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file/below", "nul\0", "\ud800"):
        with pytest.raises(MissingError):
            open_regular(tmp_path / name)


def test_links_are_followed_only_where_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", 10) == b"content"
    with pytest.raises(UnreadableError, match="is a link"):
        read_bytes(tmp_path / "link", 10, follow_links=False)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff{}", "not UTF-8"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"[1e999]", "1e999 is no number"),
        (b"1" * 5000, "not JSON"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b'{"a":' * 65 + b"0" + b"}" * 65, "nested more than 64 deep"),
        # As deep as exhausts the parser's stack.
        (b"[" * 100_000 + b"]" * 100_000, "nested more than 64 deep"),
        (b"[" * 100_000, "nested more than 64 deep"),
        (rb'{"a": "\uD800"}', "half of a surrogate pair"),
        (rb'{"\udfff": 1}', "half of a surrogate pair"),
    ],
)
def test_what_is_no_json_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        parsed_json(data)
